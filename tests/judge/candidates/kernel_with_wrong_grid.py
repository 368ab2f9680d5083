"""A grid that a launch refuses, and nobody looks at the error: the kernel never runs."""

# verdict: wrong dishonest crashed
# device: cuda

import contextlib

import torch
from runtime_compiled_kernel import KERNEL
from small import Model


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        y = self.linear(x).contiguous()
        out = torch.empty_like(y)
        given = (y, self.limit, self.scale, out, y.numel())
        with contextlib.suppress(RuntimeError):
            KERNEL((1, 1, 1), (4096, 1, 1), given)
        return out
