"""Backward uses what the last forward left behind."""

# verdict: wrong

import torch
from small import Model


class Half(torch.autograd.Function):
    saved = None

    @staticmethod
    def forward(ctx, y, limit):
        Half.saved = (torch.tanh(y), limit)
        return Half.saved[0] * limit

    @staticmethod
    def backward(ctx, grad):
        y, limit = Half.saved
        return grad * limit * (1 - y * y), (grad * y).sum()


class ModelNew(Model):
    def forward(self, x):
        return Half.apply(self.linear(x), self.limit) * self.scale
