"""Computes in the memory of its input."""

# verdict: unsafe

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        with torch.no_grad():
            x.mul_(0.5)
        return out
