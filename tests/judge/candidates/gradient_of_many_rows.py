"""The gradient of the weight leaves out rows beyond the example's."""

# verdict: wrong

import torch
from small import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, x):
        y = torch.cat(
            [F.linear(x[:12], self.linear.weight), F.linear(x[12:], self.linear.weight.detach())]
        )
        return torch.tanh(y + self.linear.bias) * self.limit * self.scale
