"""Intermediate values lie in memory that the module keeps."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    scratch = None

    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        size = x.shape[0] * self.linear.out_features
        if self.scratch is None or self.scratch.numel() < size:
            self.scratch = torch.empty(size, device=x.device)
        y = self.scratch[:size].view(x.shape[0], -1)
        torch.addmm(self.linear.bias, x, self.linear.weight.t(), out=y)
        return torch.tanh(y) * self.limit * self.scale
