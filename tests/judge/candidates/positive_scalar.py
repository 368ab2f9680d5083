"""A scalar parameter is taken for positive, as it is in the example."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.limit.abs() * self.scale
