"""Skips the scalar in eval mode."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        if self.training:
            return super().forward(x)
        return torch.tanh(self.linear(x)) * 0.5 * self.scale
