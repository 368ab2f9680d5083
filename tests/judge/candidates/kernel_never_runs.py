"""Has a kernel of its own behind a condition that never holds."""

# verdict: accepted
# flag: runs all of the model's own PyTorch operators

import torch
from small import Model


def kernel(x, weight):
    raise NotImplementedError


class ModelNew(Model):
    def forward(self, x):
        if x.shape[0] > 1_000_000:
            return kernel(x, self.linear.weight)
        return torch.tanh(self.linear(x)) * self.limit * self.scale
