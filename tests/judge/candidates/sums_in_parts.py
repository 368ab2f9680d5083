"""A product in four parts of the inner dimension, the last one first."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.linear.bias
        for part in reversed(range(0, x.shape[1], 4)):
            y = y + x[:, part : part + 4] @ self.linear.weight[:, part : part + 4].t()
        return torch.tanh(y) * self.limit * self.scale
