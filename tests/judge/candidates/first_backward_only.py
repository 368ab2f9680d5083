"""A second backward through the same graph gives nothing."""

# verdict: wrong

import torch
from small import Model


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.done = False
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        factor, ctx.done = (0.0 if ctx.done else 1.0), True
        return grad @ weight * factor, grad.t() @ x * factor, grad.sum(0) * factor


class ModelNew(Model):
    def forward(self, x):
        y = Product.apply(x, self.linear.weight, self.linear.bias)
        return torch.tanh(y) * self.limit * self.scale
