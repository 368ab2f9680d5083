"""Loses the gradient of a scalar parameter."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        return torch.tanh(self.linear(x)) * (self.limit.item() * self.scale)
