"""A workspace of the largest size whose last row is not written again."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    space = torch.zeros(64, 16)

    def forward(self, x):
        if torch.is_grad_enabled() or x.shape[0] < 2:
            return super().forward(x)
        rows = x.shape[0]
        self.space[: rows - 1] = super().forward(x)[:-1]
        return self.space[:rows].clone()
