"""A softmax in several steps, with its maximum."""

# verdict: accepted

import torch
from norm import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.norm(x)
        e = torch.exp(y - y.amax(dim=1, keepdim=True).detach())
        return e / e.sum(dim=1, keepdim=True), y.sum(dim=1) / y.shape[1]
