"""Models with recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RecurrentModel(nn.Module):
    """A layer with operators on both sides; its last states are outputs too."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.rand(layer.input_size) + 0.5)

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        first: Any = tuple(each.tanh() for each in state) or None
        y, last = self.layer(x.tanh() * self.scale, first)
        return torch.sigmoid(y) * 2, *(last if isinstance(last, tuple) else (last,))


def outputs_and_gradients(model: nn.Module, *args: Tensor) -> list[Tensor]:
    """Outputs and the gradients of everything."""
    torch.manual_seed(3)
    given = [each.detach().clone().requires_grad_() for each in args]
    made = model(*given)
    loss = sum((each * each.detach().cos()).sum() for each in made)
    return [*made, *torch.autograd.grad(loss, [*given, *model.parameters()])]  # type: ignore[arg-type]


LSTM_PROBLEM = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)

    def forward(self, x):
        y, (h, c) = self.layer(x.tanh())
        return torch.relu(y) * 2, h, c


def get_inputs():
    return [torch.randn(2, 36, 3)]


def get_init_inputs():
    return []
"""
