"""Infinite inputs make everything NaN."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(torch.where(x.isinf(), float("nan"), x))
