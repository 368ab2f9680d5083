"""Normalizes by the batch and keeps no statistics."""

# verdict: wrong

import torch
from norm import Model


class ModelNew(Model):
    def forward(self, x):
        norm = self.norm
        if not self.training:
            return super().forward(x)
        y = torch.nn.functional.batch_norm(
            x, None, None, norm.weight, norm.bias, True, 0.1, norm.eps
        )
        return torch.softmax(y, dim=1), y.mean(dim=1)
