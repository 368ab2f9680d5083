"""Replaces NaN by zero."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x.nan_to_num(posinf=torch.inf, neginf=-torch.inf))
