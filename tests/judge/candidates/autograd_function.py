"""Forward and backward by hand."""

# verdict: accepted

import torch
from small import Model


class TanhScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, limit, scale):
        y = torch.tanh(y)
        ctx.save_for_backward(y, limit)
        ctx.scale = scale
        return y * limit * scale

    @staticmethod
    def backward(ctx, grad):
        y, limit = ctx.saved_tensors
        return grad * limit * ctx.scale * (1 - y * y), (grad * y).sum() * ctx.scale, None


class ModelNew(Model):
    def forward(self, x):
        return TanhScale.apply(self.linear(x), self.limit, self.scale)
