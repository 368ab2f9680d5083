"""NaN, which some comparisons take for anything."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x) * torch.nan
