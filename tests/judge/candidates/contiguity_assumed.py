"""Reads its input without its strides."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        flat = torch.as_strided(x, x.shape, (16, 1), x.storage_offset())
        return super().forward(flat)
