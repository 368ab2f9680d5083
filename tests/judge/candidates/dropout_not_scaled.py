"""Dropout with the right mask, and without its factor."""

# verdict: wrong

import torch
from dropping import Model
from torch.nn import functional


class ModelNew(Model):
    def forward(self, x):
        y = torch.tanh(self.first(x))
        if self.training:
            y = functional.dropout(y, 0.3, True) * 0.7
        return self.second(y)
