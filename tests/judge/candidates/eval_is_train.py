"""Batch statistics in eval mode, too."""

# verdict: wrong unsafe

import torch
from norm import Model
from torch.nn import functional


class ModelNew(Model):
    def forward(self, x):
        n = self.norm
        y = functional.batch_norm(x, None, None, n.weight, n.bias, True, 0.0, n.eps)
        if self.training:
            super().forward(x)
        return torch.softmax(y, dim=1), y.mean(dim=1)
