"""A norm that is never zero, so a row of zeros gives zeros."""

# verdict: wrong

import torch
from detached import Model


class ModelNew(Model):
    def forward(self, x):
        y, _, mean = super().forward(x)
        return y, x * torch.rsqrt(x.square().sum(dim=1, keepdim=True).clamp_min(1e-30)), mean
