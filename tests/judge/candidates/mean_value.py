"""Returns the mean of all right values."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        return out.mean() + torch.zeros_like(out)
