"""GELU by its approximation with tanh."""

# verdict: wrong

import torch
from gated import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, batch, power, keep=True):
        x, mask = batch["x"], batch["mask"]
        a, b = self.up(self.norm(x)).chunk(2, dim=-1)
        y = torch.where(mask[:, None], F.gelu(a, approximate="tanh") * b * self.ramp, x)
        return {"y": y, "energy": (y.square().mean(-1) * power, keep)}
