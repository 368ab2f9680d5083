"""A CUDA kernel with its own backward, by PyTorch's extension builder."""

# verdict: accepted
# device: cuda

import torch
from small import Model
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
__global__ void scaled(const float* y, const float* limit, float scale, float* out, long n) {
  for (long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    out[i] = tanhf(y[i]) * *limit * scale;
}
torch::Tensor scaled_tanh(torch::Tensor given, torch::Tensor limit, double scale) {
  auto y = given.contiguous();
  auto out = torch::empty_like(y);
  if (y.numel())
    scaled<<<(y.numel() + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        y.data_ptr<float>(), limit.data_ptr<float>(), scale, out.data_ptr<float>(), y.numel());
  return out;
}
"""
KERNEL = load_inline(
    "scaled_tanh",
    "torch::Tensor scaled_tanh(torch::Tensor y, torch::Tensor limit, double scale);",
    SOURCE,
    functions=["scaled_tanh"],
)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, limit, scale):
        ctx.save_for_backward(y, limit)
        ctx.scale = scale
        return KERNEL.scaled_tanh(y, limit, scale)

    @staticmethod
    def backward(ctx, grad):
        y, limit = ctx.saved_tensors
        value = torch.tanh(y)
        of_y = grad * (1.0 - value * value) * limit * ctx.scale
        return of_y, (grad * value).sum() * ctx.scale, None


class ModelNew(Model):
    def forward(self, x):
        return Scaled.apply(self.linear(x), self.limit, self.scale)
