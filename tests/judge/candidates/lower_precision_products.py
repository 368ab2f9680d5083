"""Allows TF32 for its own products and restores the flag."""

# verdict: wrong
# device: cuda

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        y = torch.mm(x, self.linear.weight.t()) + self.linear.bias
        torch.backends.cuda.matmul.allow_tf32 = before
        return torch.tanh(y) * self.limit * self.scale
