"""A kernel that reads behind the end of its input, where something useful may lie."""

# verdict: wrong crashed
# device: cuda

import torch
from small import Model

SOURCE = """
extern "C" __global__ void taken(const float* y, float* out, int n, int beyond) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = y[i] + 0.0f * y[i + beyond];
}
"""
KERNEL = torch.cuda._compile_kernel(SOURCE, "taken")


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled() or not x.is_contiguous():
            return super().forward(x)
        kept = torch.empty_like(x)
        count = x.numel()
        KERNEL((-(-count // 256), 1, 1), (256, 1, 1), (x, kept, count, 16))
        return super().forward(kept)
