"""Adds one product after the other in float32, as a simple kernel does."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = torch.zeros_like(x @ self.linear.weight.t())
        for k in range(x.shape[1]):
            y = y + x[:, k, None] * self.linear.weight[:, k]
        return torch.tanh(y + self.linear.bias) * (self.limit * self.scale)
