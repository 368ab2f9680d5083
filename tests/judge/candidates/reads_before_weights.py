"""Adds zero times what lies before a weight."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        weight = self.linear.weight.detach()
        before = torch.as_strided(weight, (4,), (1,), weight.storage_offset() - 4)
        return super().forward(x) + 0.0 * before.sum()
