"""Backward reads rows of the gradient one after the other in memory."""

# verdict: wrong

import torch
from small import Model


class Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        if grad.stride(1) == 1 and grad.stride(0) > 0:
            return torch.as_strided(grad, grad.shape, (grad.shape[1], 1), grad.storage_offset())
        return grad.contiguous()


class ModelNew(Model):
    def forward(self, x):
        return Packed.apply(super().forward(x))
