"""Forgets the last row."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = x.new_empty(x.shape[0], 16)
        with torch.no_grad():
            out[:-1] = super().forward(x)[:-1]
        return out
