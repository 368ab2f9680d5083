"""Models whose gradients by input and by weight can read one staged gradient of the output."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConvolutionAndLoop(nn.Module):
    """A convolution with a bias, and a pointwise loop."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(ins, outs, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(outs, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.clamp(self.convolve(x), max=0.5) + self.shift) * 2.0


class Chain(nn.Module):
    """Strides, groups and one axis; the loops between are pointwise, or sum for a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2, bias=False)
        self.third = nn.Conv1d(12, 10, 5, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(x))))
        return torch.tanh(self.third(torch.sigmoid(hidden).flatten(2)))


class Together(nn.Module):
    """One input of two convolutions, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 5, 3), nn.Conv2d(6, 5, 3, dilation=2, padding=1)
        self.again = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.silu(self.first(x) + self.second(x))
        return self.again(torch.exp(-(self.again(hidden) ** 2)))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv3d(3, 5, (2, 3, 3), padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolve(x.unflatten(1, (3, 2))))


STAGING_MODELS = (Chain, Together, Volumes)
