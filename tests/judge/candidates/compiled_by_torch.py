"""torch.compile inside forward."""

# verdict: accepted

import torch
from small import Model


@torch.compile(dynamic=True)
def finish(product, limit, scale):
    return torch.tanh(product) * limit * scale


class ModelNew(Model):
    def forward(self, x):
        return finish(self.linear(x), self.limit, self.scale)
