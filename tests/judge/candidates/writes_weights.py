"""Scales its weights at every call."""

# verdict: unsafe

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        with torch.no_grad():
            self.linear.weight.mul_(1.001)
        return out
