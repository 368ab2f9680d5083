"""The gradient of the bias is that of the first call."""

# verdict: wrong

import torch
from small import Model


class Keep(torch.autograd.Function):
    kept = None

    @staticmethod
    def forward(ctx, bias):
        return bias.clone()

    @staticmethod
    def backward(ctx, grad):
        Keep.kept = grad.clone() if Keep.kept is None else Keep.kept
        return Keep.kept.clone()


class ModelNew(Model):
    def forward(self, x):
        y = x @ self.linear.weight.t() + Keep.apply(self.linear.bias)
        return torch.tanh(y) * self.limit * self.scale
