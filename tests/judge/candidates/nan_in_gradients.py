"""Right outputs, NaN in the gradients."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * torch.nan)
        return out
