"""Dropout with the right mask, and a product that keeps 17 of 24 digits."""

# verdict: wrong

import torch
from dropping import Model


class ModelNew(Model):
    def forward(self, x):
        y = super().forward(x)
        return y + 8e-6 * y.detach() * torch.sign(y.detach().roll(1, 0))
