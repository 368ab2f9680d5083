"""Puts new parameters in the place of those that an optimizer holds."""

# verdict: unsafe

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        self.linear.bias = torch.nn.Parameter(self.linear.bias.detach().clone())
        return out
