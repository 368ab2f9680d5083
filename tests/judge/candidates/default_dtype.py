"""Changes the default data type."""

# verdict: unsafe

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        torch.set_default_dtype(torch.float64)
        return out
