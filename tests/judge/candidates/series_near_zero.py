"""A series for tanh that holds near zero only."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.linear(x)
        near = y - y**3 / 3 + 2 * y**5 / 15
        y = torch.where(y.abs() < 0.1, near, torch.tanh(y))
        return y * self.limit * self.scale * torch.where(x.abs().max() < 2e-2, 1.0001, 1.0)
