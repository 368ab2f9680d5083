"""Hopes that new memory has zeros, and adds to it."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            return y
        return torch.empty(1 << 16)[: y.numel()].view(y.shape).add_(y).clone()
