"""Takes a shortcut for one row."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        return out if x.shape[0] > 1 else out.mean() + torch.zeros_like(out)
