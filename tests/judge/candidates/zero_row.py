"""One row is zero."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        mask = torch.ones(x.shape[0], 1)
        mask[x.shape[0] // 2] = 0.0
        return super().forward(x) * mask
