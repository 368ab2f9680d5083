"""A decomposition runs once for equal operands; later calls copy its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture, repeats
from fusewright.ir.graph import pretty


class Twice(nn.Module):
    """The same layers, several times."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = F.silu(norm(x)) + F.gelu(x).softmax(1)
        return x


class Unlike(nn.Module):
    """Equal operators with operands that differ in one respect each."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * self.slope
        first = F.leaky_relu(y, 0.1), F.leaky_relu(y, 0.2), F.leaky_relu(y.double(), 0.1)
        turned = F.leaky_relu(y.transpose(0, 1), 0.1), F.leaky_relu(y[:, :2], 0.1)
        sums = F.mse_loss(y, y), F.mse_loss(y, x), F.mse_loss(x, y)
        return (*first, *turned, *sums)


class Drawn(nn.Module):
    """Random numbers between equal operators."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.silu(F.dropout(F.silu(x), 0.5)), 0.5) + F.silu(x)


class Shapes(nn.Module):
    """Sizes that are computed from the batch size."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        for _ in range(3):
            x = F.layer_norm(x, x.shape[1:]) / x.shape[0]
        return F.glu(torch.cat([x, x], 1), 1).sum(0)


def plainly(model: nn.Module, x: Tensor, mode: str) -> str:
    """The program without copies."""
    with patch.object(repeats, "_recorded", side_effect=repeats._NotAlike):
        return text(model, x, mode)


def text(model: nn.Module, x: Tensor, mode: str) -> str:
    program = capture(model, (x,), mode=mode)
    parts = (program.forward, program.inference, program.backward)
    return "\n".join(pretty(each) for each in parts if each is not None)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("make", [Twice, Unlike, Drawn, Shapes])
def test_a_copy_is_what_the_decomposition_gives(make: Callable[[], nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(4, 4, 4, 4)
    assert text(model, x, mode) == plainly(model, x, mode)


def counted(model: nn.Module, x: Tensor) -> dict[str, int]:
    """How many calls were copied or recorded."""
    found = {"_copied": 0, "_recorded": 0}

    def noting(name: str) -> Callable[..., Any]:
        plain = getattr(repeats, name)

        def run(*args: Any) -> Any:
            found[name] += 1
            return plain(*args)

        return run

    with patch.multiple(repeats, **{name: noting(name) for name in found}):
        capture(model, (x,), mode="train")
    return found


def test_equal_layers_are_decomposed_once() -> None:
    x = torch.randn(4, 4, 4, 4)
    three = counted(Twice(), x)
    model = Twice()
    model.norms.extend(nn.BatchNorm2d(4) for _ in range(3))
    six = counted(model, x)
    assert three["_recorded"] == six["_recorded"]
    assert six["_copied"] > 2 * three["_copied"] > 0


def test_operands_that_differ_are_decomposed_apart() -> None:
    model, x = Unlike(), torch.randn(4, 4, 4, 4)
    found = counted(model, x)
    # Five calls of leaky_relu, and their gradients.
    assert found["_recorded"] >= 10
