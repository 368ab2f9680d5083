"""Operands keep eleven bits, as in TF32."""

# verdict: wrong

import torch
from small import Model


def cut(values):
    whole = values.detach()
    factor = whole * 8193.0
    return values + ((factor - (factor - whole)) - whole)


class ModelNew(Model):
    def forward(self, x):
        y = cut(x) @ cut(self.linear.weight).t() + self.linear.bias
        return torch.tanh(y) * self.limit * self.scale
