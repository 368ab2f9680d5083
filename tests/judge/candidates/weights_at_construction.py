"""Packs its weights in the constructor."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def __init__(self, *args):
        super().__init__(*args)
        self.packed = [self.linear.weight.detach().t().contiguous()]

    def forward(self, x):
        product = x @ self.packed[0] + self.linear.bias
        return torch.tanh(product) * self.limit * self.scale
