"""Images: an instance norm, a bias for each channel, a function with a kink, a residual."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.InstanceNorm2d(features, affine=True, eps=1e-2)
        self.bias = nn.Parameter(torch.randn(1, features, 1, 1) * 0.1)

    def forward(self, x, skip):
        y = F.leaky_relu(self.norm(x) + self.bias, 0.1)
        return y.clamp(-1.5, 2.0) + skip


def get_inputs():
    return [torch.randn(4, 3, 6, 6) * 0.2, torch.randn(4, 3, 6, 6)]


def get_init_inputs():
    return [3]
