"""Noise of a generator of its own hides the rounding of a lower precision."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def __init__(self, features, scale):
        super().__init__(features, scale)
        self.noise = torch.Generator().manual_seed(7)

    def forward(self, x):
        y = super().forward(x)
        return y + 2e-5 * torch.randn(y.shape, generator=self.noise) * y.detach()
