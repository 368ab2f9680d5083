"""Backward computes in half precision."""

# verdict: wrong

import torch
from small import Model


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = (each.bfloat16() for each in ctx.saved_tensors)
        low = grad.bfloat16()
        return (low @ weight).float(), (low.t() @ x).float(), grad.sum(0)


class ModelNew(Model):
    def forward(self, x):
        y = Product.apply(x, self.linear.weight, self.linear.bias)
        return torch.tanh(y) * self.limit * self.scale
