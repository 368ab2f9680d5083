"""A weight is used twice, and one use has no gradient."""

# verdict: wrong

import torch
from tied import Model


class ModelNew(Model):
    def forward(self, index, x):
        y = torch.tanh(self.table.detach()[index] + x * self.shift)
        return y @ self.table.t()
