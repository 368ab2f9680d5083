"""Gradients of the bias exist only with those of the input."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        bias = self.linear.bias if x.requires_grad else self.linear.bias.detach()
        y = x @ self.linear.weight.t() + bias
        return torch.tanh(y) * self.limit * self.scale
