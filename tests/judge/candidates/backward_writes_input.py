"""Backward uses the saved input as its workspace."""

# verdict: unsafe wrong

import torch
from small import Model


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.kept = (x.detach(), weight.detach())
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.kept
        of_weight = grad.t() @ x
        return x.copy_(grad @ weight).clone(), of_weight, grad.sum(0)


class ModelNew(Model):
    def forward(self, x):
        y = Product.apply(x, self.linear.weight, self.linear.bias)
        return torch.tanh(y) * self.limit * self.scale
