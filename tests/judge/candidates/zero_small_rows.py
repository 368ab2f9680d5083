"""Rows that are much smaller than others are zero."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        sizes = x.abs().amax(dim=1, keepdim=True)
        return torch.where(sizes < 0.05 * sizes.max(), 0.0, super().forward(x))
