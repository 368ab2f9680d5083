"""The gradient of the bias is half as large if there is one row."""

# verdict: wrong

import torch
from small import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, x):
        bias = self.linear.bias
        if x.shape[0] == 1:
            bias = 0.5 * bias + 0.5 * bias.detach()
        return torch.tanh(F.linear(x, self.linear.weight, bias)) * self.limit * self.scale
