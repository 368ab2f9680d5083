"""Triton kernels for forward and backward."""

# verdict: accepted
# device: cuda

import torch
import triton
import triton.language as tl
from small import Model
from triton.language.extra import libdevice


@triton.jit
def forwards(y, limit, out, count, scale, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    value = libdevice.tanh(tl.load(y + at, inside))
    tl.store(out + at, value * tl.load(limit) * scale, inside)


@triton.jit
def backwards(y, grad, limit, of_y, of_limit, count, scale, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    inside = at < count
    value = libdevice.tanh(tl.load(y + at, inside, other=0.0))
    given = tl.load(grad + at, inside, other=0.0)
    tl.store(of_y + at, given * (1.0 - value * value) * tl.load(limit) * scale, inside)
    tl.store(of_limit + at, given * value * scale, inside)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, limit, scale):
        y = y.contiguous()
        out = torch.empty_like(y)
        forwards[(triton.cdiv(y.numel(), 256),)](y, limit, out, y.numel(), scale, size=256)
        ctx.save_for_backward(y, limit)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        y, limit = ctx.saved_tensors
        grad = grad.contiguous()
        of_y, terms = torch.empty_like(y), torch.empty_like(y)
        grid = (triton.cdiv(y.numel(), 256),)
        backwards[grid](y, grad, limit, of_y, terms, y.numel(), ctx.scale, size=256)
        return of_y, terms.sum(), None


class ModelNew(Model):
    def forward(self, x):
        return Scaled.apply(self.linear(x), self.limit, self.scale)
