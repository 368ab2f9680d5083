"""One channel is off by a thousandth."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        factor = torch.ones(16)
        factor[11] = 1.001
        return super().forward(x) * factor
