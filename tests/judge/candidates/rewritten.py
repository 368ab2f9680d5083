"""The same in other PyTorch operators."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        product = torch.addmm(self.linear.bias, x, self.linear.weight.t())
        return product.tanh_().mul(self.limit * self.scale)
