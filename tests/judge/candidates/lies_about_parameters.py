"""Shows the harness parameters that it does not use."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        frozen = {name: each.detach().clone() for name, each in self.named_parameters()}
        object.__setattr__(self, "frozen", frozen)

    def forward(self, x):
        held = self.frozen
        y = torch.tanh(x @ held["linear.weight"].t() + held["linear.bias"])
        return y * held["limit"] * self.scale + 0.0 * super().forward(x)
