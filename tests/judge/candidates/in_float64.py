"""Computes in float64 and rounds once."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        product = torch.nn.functional.linear(
            x.double(), self.linear.weight.double(), self.linear.bias.double()
        )
        return (torch.tanh(product) * self.limit.double() * self.scale).float()
