"""Rows one after the other, in plain Python."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        rows = [torch.mv(self.linear.weight, row) + self.linear.bias for row in x.unbind(0)]
        return torch.tanh(torch.stack(rows)) * (self.limit * self.scale)
