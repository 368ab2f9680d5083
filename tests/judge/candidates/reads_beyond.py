"""Adds zero times what lies behind its input."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        behind = torch.as_strided(x.detach(), (4,), (1,), x.storage_offset() + x.numel())
        return super().forward(x) + 0.0 * behind.sum()
