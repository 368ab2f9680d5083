"""Reads the incoming gradient without its strides."""

# verdict: wrong

import torch
from small import Model


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        size = min(grad.untyped_storage().nbytes() // 4, grad.numel())
        flat = torch.zeros(grad.numel())
        flat[:size] = torch.as_strided(grad, (size,), (1,), 0)
        return flat.view(grad.shape)


class ModelNew(Model):
    def forward(self, x):
        return Through.apply(super().forward(x))
