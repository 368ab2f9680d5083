"""Gradients of the bias exist only with those of the weight."""

# verdict: wrong

import torch
from small import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, x):
        w, b = self.linear.weight, self.linear.bias
        b = b if w.requires_grad else b.detach()
        return torch.tanh(F.linear(x, w, b)) * self.limit * self.scale
