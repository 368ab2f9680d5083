"""Computes forward again in backward."""

# verdict: accepted

import torch
from small import Model
from torch.utils.checkpoint import checkpoint


class ModelNew(Model):
    def forward(self, x):
        def body(x):
            return torch.tanh(self.linear(x)) * self.limit * self.scale

        if not torch.is_grad_enabled():
            return body(x)
        return checkpoint(body, x, use_reentrant=False)
