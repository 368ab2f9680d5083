"""Gradients that are small are NaN."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: torch.where(g.abs() < 0.02, float("nan"), g))
        return y
