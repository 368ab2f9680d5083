"""Two gates, a dict of outputs, a dict of inputs, a mask, a number that is no tensor."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, features, *, eps=1e-3):
        super().__init__()
        self.up = nn.Linear(features, 2 * features)
        self.norm = nn.LayerNorm(features, eps=eps)
        self.register_buffer("ramp", torch.linspace(0.5, 1.5, features), persistent=False)

    def forward(self, batch, power, keep=True):
        x, mask = batch["x"], batch["mask"]
        a, b = self.up(self.norm(x)).chunk(2, dim=-1)
        y = F.gelu(a) * b * self.ramp
        y = torch.where(mask[:, None], y, x)
        return {"y": y, "energy": (y.square().mean(-1) * power, keep)}


def get_inputs():
    return [{"x": torch.randn(9, 6) * 0.1, "mask": torch.rand(9) > 0.4}, 0.5, True]


def get_init_inputs():
    return [6]
