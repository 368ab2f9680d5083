"""Draws random numbers where the model draws none."""

# verdict: unsafe

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        noise = torch.rand(4)
        return super().forward(x) + 0.0 * noise.sum()
