"""Backward overwrites `.grad` instead of adding to it."""

# verdict: wrong unsafe

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        weight = self.linear.weight
        if not torch.is_grad_enabled():
            return super().forward(x)
        outer = self
        y = x @ weight.detach().t() + self.linear.bias

        def keep(grad):
            outer.linear.weight.grad = grad.t() @ x.detach()

        y.register_hook(keep)
        return torch.tanh(y) * self.limit * self.scale
