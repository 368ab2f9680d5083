"""An autograd.Function with out variants and a backward that is marked as final."""

# verdict: accepted

import torch
from small import Model
from torch.autograd.function import once_differentiable


class Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, product, limit, scale):
        y = torch.empty_like(product)
        torch.tanh(product, out=y)
        ctx.save_for_backward(y, limit)
        ctx.scale = scale
        return y * (limit * scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        y, limit = ctx.saved_tensors
        inner = gradient * (1 - y * y) * (limit * ctx.scale)
        outer = (gradient * y).sum() * ctx.scale if ctx.needs_input_grad[1] else None
        return inner, outer, None


class ModelNew(Model):
    def forward(self, x):
        return Finish.apply(self.linear(x), self.limit, self.scale)
