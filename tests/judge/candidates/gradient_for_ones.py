"""Backward is right if all incoming gradients are equal."""

# verdict: wrong

import torch
from small import Model


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, limit):
        ctx.save_for_backward(y, limit)
        return y * limit

    @staticmethod
    def backward(ctx, grad):
        y, limit = ctx.saved_tensors
        return grad * limit, y.sum() * grad.mean()


class ModelNew(Model):
    def forward(self, x):
        return Times.apply(torch.tanh(self.linear(x)), self.limit) * self.scale
