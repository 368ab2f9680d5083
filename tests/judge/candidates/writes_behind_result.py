"""A kernel that writes one element more than its result has."""

# verdict: wrong dishonest unsafe crashed
# device: cuda

import torch
from small import Model

SOURCE = """
extern "C" __global__ void written(const float* y, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n + 512) out[i] = i < n ? y[i] : 0.0f;
}
"""
KERNEL = torch.cuda._compile_kernel(SOURCE, "written")


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        y = super().forward(x)
        out = torch.empty_like(y)
        count = y.numel()
        KERNEL((-(-count // 256) + 2, 1, 1), (256, 1, 1), (y, out, count))
        return out
