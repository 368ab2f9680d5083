"""The last column is the mean of its neighbours."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[:, :-1], y[:, -3:-1].mean(dim=1, keepdim=True)], dim=1)
