"""Small models and functions that several tests compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARG_EXTREMES = {"argmax": torch.argmax, "argmin": torch.argmin}
PADDING_MODES = ("reflect", "replicate", "circular")


class Lambda(nn.Module):
    """A function of the inputs, as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class ParametricLambda(Lambda):
    """A function of a module with these parameters, and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__(function)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Padded(nn.Module):
    def __init__(self, padding: tuple[int, ...], mode: str) -> None:
        super().__init__()
        self.padding, self.mode = padding, mode

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.padding, mode=self.mode)


class OverChannels(nn.Module):
    """One function for each input; norms have weights, which all columns share."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(each) + 0.5 for each in channels)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = (x[:, : len(each)] for each in self.weights)
        layer = F.layer_norm(first.movedim(1, -1), (first.shape[1],), self.weights[0])
        scale = torch.rsqrt(second.square().mean(1, keepdim=True) + 1e-5)
        return (
            layer.movedim(-1, 1) * 2,
            F.gelu(second * scale * self.weights[1][:, None, None]),
            third.softmax(1) * self.weights[2][:, None, None] + third.amax(1, keepdim=True),
        )
