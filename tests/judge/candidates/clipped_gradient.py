"""Gradients are clipped, which no example shows."""

# verdict: wrong

import torch
from small import Model


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1.5, 1.5)


class ModelNew(Model):
    def forward(self, x):
        return Clipped.apply(torch.tanh(self.linear(x)) * self.limit * self.scale)
