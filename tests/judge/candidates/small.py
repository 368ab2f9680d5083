"""A matmul, a pointwise chain without kinks, and a scalar parameter that learns."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.limit = nn.Parameter(torch.tensor(0.5))
        self.scale = scale

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.limit * self.scale


def get_inputs():
    return [torch.randn(12, 16)]


def get_init_inputs():
    return [16, 1.5]
