"""The gradient of the input comes from differences of outputs."""

# verdict: wrong

import torch
from small import Model


class ByDifferences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, step):
        ctx.save_for_backward(y)
        ctx.step = step
        return torch.tanh(y)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        slope = (torch.tanh(y + ctx.step) - torch.tanh(y - ctx.step)) / (2 * ctx.step)
        return gradient * slope, None


class ModelNew(Model):
    def forward(self, x):
        return ByDifferences.apply(self.linear(x), 1e-3) * self.limit * self.scale
