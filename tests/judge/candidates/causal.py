"""Causal attention with as many positions as features of a head."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features, bias=False)

    def forward(self, x):
        b, t, f = x.shape
        q, k, v = (e.view(b, t, self.heads, -1).transpose(1, 2) for e in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * (f // self.heads) ** -0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, f))


def get_inputs():
    return [torch.randn(3, 4, 8)]


def get_init_inputs():
    return [8, 2]
