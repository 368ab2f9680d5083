"""Backward works with the newest forward's input, found by the shape of the gradient."""

# verdict: wrong

import torch
from small import Model

NEWEST = {}


class Newest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        NEWEST[y.shape] = torch.tanh(y)
        return NEWEST[y.shape].clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - NEWEST[gradient.shape] ** 2)


class ModelNew(Model):
    def forward(self, x):
        return Newest.apply(self.linear(x)) * self.limit * self.scale
