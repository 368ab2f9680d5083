"""Backward computes forward again and takes its vector-Jacobian product."""

# verdict: accepted

import torch
from small import Model
from torch.nn import functional


def formula(x, weight, bias, limit, scale):
    return torch.tanh(functional.linear(x, weight, bias)) * limit * scale


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, limit, scale):
        ctx.save_for_backward(x, weight, bias, limit)
        ctx.scale = scale
        return formula(x, weight, bias, limit, scale)

    @staticmethod
    def backward(ctx, gradient):
        _, back = torch.func.vjp(lambda *each: formula(*each, ctx.scale), *ctx.saved_tensors)
        return (*back(gradient), None)


class ModelNew(Model):
    def forward(self, x):
        return Again.apply(x, self.linear.weight, self.linear.bias, self.limit, self.scale)
