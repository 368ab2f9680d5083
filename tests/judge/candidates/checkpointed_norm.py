"""Recomputes a batch norm in backward, which moves its statistics twice."""

# verdict: wrong

import torch
import torch.utils.checkpoint
from norm import Model


class ModelNew(Model):
    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)
