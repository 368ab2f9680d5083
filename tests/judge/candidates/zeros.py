"""Returns zeros."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        return torch.zeros(x.shape[0], 16)
