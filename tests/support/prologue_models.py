"""Models whose convolutions can compute their input while they load it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dense(nn.Module):
    """Batch norms and ReLUs before convolutions, a concatenation, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(12), nn.BatchNorm2d(20)
        self.narrow = nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.wide = nn.Conv2d(20, 12, 1)
        for norm in (self.first, self.second):
            norm.running_mean.normal_()  # type: ignore[union-attr]
            norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        grown = torch.cat([x, self.narrow(torch.relu(self.first(x)))], 1)
        return torch.tanh(self.wide(torch.relu(self.second(grown))) + x)


class Squeezed(nn.Module):
    """A factor for each image and channel; strides, groups, infinity and NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Linear(12, 12)
        self.convolve = nn.Conv2d(12, 8, 3, stride=2, padding=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sigmoid(self.factor(x.mean((2, 3))))
        return F.silu(self.convolve(x * factor[:, :, None, None]))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(12, 9, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolve(F.max_pool2d(x, 2)))


class Signals(nn.Module):
    """One axis with contiguous channels, a transposed convolution, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.first = nn.Conv1d(12, 10, 5, padding=2)
        self.second = nn.ConvTranspose1d(10, 6, 4, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.gelu(x.view(x.shape[0], 80, 12).transpose(1, 2) * self.scale))
        return self.second(torch.sin(hidden.flip(0)))


class Joined(nn.Module):
    """A concatenation that only a convolution reads, and minima of four."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(12, 6, 3), nn.Conv2d(24, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        small = self.first(-F.max_pool2d(-x, 2, 1, 1))
        near = x[:, :, 1:, 1:]
        return self.second(torch.cat([near[:, 4:], small, small.tanh()[:, :2], near[:, 2:10]], 1))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv3d(3, 5, (2, 3, 3), padding=1)

    def forward(self, x: Tensor) -> Tensor:
        volumes = x.unflatten(1, (3, 4))
        return self.convolve(torch.where(volumes > 0, volumes, 0.1 * volumes))


PROLOGUE_MODELS = (Dense, Squeezed, Pooled, Joined, Signals, Volumes)
