"""Packs its weights again whenever they have changed."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    packed, key = None, None

    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        weight = self.linear.weight
        key = (weight.data_ptr(), weight._version)
        if self.key != key:
            self.packed, self.key = weight.detach().t().contiguous(), key
        product = torch.addmm(self.linear.bias, x, self.packed)
        return torch.tanh(product) * self.limit * self.scale
