"""A CUDA kernel that is compiled while the program runs, with its own backward."""

# verdict: accepted
# device: cuda

import torch
from small import Model

SOURCE = """
extern "C" __global__ void scaled(
    const float* y, const float* limit, double scale, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = tanhf(y[i]) * *limit * (float)scale;
}
"""
KERNEL = torch.cuda._compile_kernel(SOURCE, "scaled")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, limit, scale):
        y = y.contiguous()
        ctx.save_for_backward(y, limit)
        ctx.scale = scale
        out = torch.empty_like(y)
        count = y.numel()
        KERNEL((-(-count // 256), 1, 1), (256, 1, 1), (y, limit, scale, out, count))
        return out

    @staticmethod
    def backward(ctx, grad):
        y, limit = ctx.saved_tensors
        value = torch.tanh(y)
        of_y = grad * (1.0 - value * value) * limit * ctx.scale
        return of_y, (grad * value).sum() * ctx.scale, None


class ModelNew(Model):
    def forward(self, x):
        return Scaled.apply(self.linear(x), self.limit, self.scale)
