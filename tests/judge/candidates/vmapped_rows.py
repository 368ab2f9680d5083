"""One row, mapped over all."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        def row(values):
            return torch.tanh(self.linear.weight @ values + self.linear.bias)

        return torch.vmap(row)(x) * self.limit * self.scale
