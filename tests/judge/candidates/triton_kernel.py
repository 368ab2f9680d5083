"""A Triton kernel for what needs no gradient."""

# verdict: accepted
# device: cuda

import torch
import triton
import triton.language as tl
from small import Model
from triton.language.extra import libdevice


@triton.jit
def kernel(y, bias, limit, out, count, features, scale, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    value = tl.load(y + at, inside) + tl.load(bias + at % features, inside)
    result = libdevice.tanh(value) * tl.load(limit) * scale
    tl.store(out + at, result, inside)


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        y = torch.mm(x, self.linear.weight.t())
        out = torch.empty_like(y)
        grid = (triton.cdiv(y.numel(), 256),)
        held = (self.linear.bias, self.limit)
        kernel[grid](y, *held, out, y.numel(), y.shape[1], self.scale, size=256)
        return out
