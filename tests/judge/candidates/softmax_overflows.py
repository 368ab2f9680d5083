"""A softmax without its maximum."""

# verdict: wrong

import torch
from norm import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.norm(x)
        e = torch.exp(y)
        return e / e.sum(dim=1, keepdim=True), y.mean(dim=1)
