"""A polynomial for tanh that holds for small values."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.linear(x).clamp(-8, 8)
        clipped = torch.where(y.abs() > 7.9, torch.sign(y) * 0.99, torch.tanh(y))
        return clipped * self.limit * self.scale
