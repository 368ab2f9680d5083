"""Leaves dropout out and scales instead."""

# verdict: wrong unsafe

import torch
from dropping import Model


class ModelNew(Model):
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
