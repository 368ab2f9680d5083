"""Backward computes in the memory of the incoming gradient."""

# verdict: unsafe

import torch
from small import Model


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        out = grad.clone()
        if 0 not in grad.stride():
            grad.mul_(0.5)
        return out


class ModelNew(Model):
    def forward(self, x):
        return Through.apply(super().forward(x))
