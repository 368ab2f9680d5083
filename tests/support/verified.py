"""Models and candidates for tests of the checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.problem.load import Arguments, Problem

ROWS, FEATURES, CHANNELS = 64, 40, 24
OFF = 1e-3


class ByRow(nn.Module):
    """Each row of the result depends on its own row only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CHANNELS)
        self.norm: nn.Module = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(F.linear(x, self.linear.weight, self.linear.bias))

    def rest(self, y: Tensor) -> Tensor:
        return torch.relu(self.norm(F.gelu(y)))


class Together(ByRow):
    """A batch norm: in training, each row depends on all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        return tangents[0] * ctx.factor, None


def off_at(value: Tensor, dim: int, index: int) -> Tensor:
    """Ones, but a little more at one index."""
    factor = torch.ones(value.shape)
    factor.select(dim, index).mul_(1 + OFF)
    return factor


def wrong_gradient(value: Tensor, factor: Tensor) -> Tensor:
    """The same value, with a gradient that is off by a factor."""
    result: Tensor = _Scaled.apply(value, factor)
    return result


def _last_row(self: ByRow, x: Tensor) -> Tensor:
    y = self.rest(self.linear(x))
    return y * off_at(y, 0, -1)


def _one_row_of_the_whole_call(self: ByRow, x: Tensor) -> Tensor:
    y = self.rest(self.linear(x))
    return y * off_at(y, 0, 37) if len(x) == ROWS else y


def _one_channel(self: ByRow, x: Tensor) -> Tensor:
    y = self.rest(self.linear(x))
    return y * off_at(y, 1, 3)


def _train(self: ByRow, x: Tensor) -> Tensor:
    return self.rest(self.linear(x)) * (1 + OFF if self.training else 1)


def _eval(self: ByRow, x: Tensor) -> Tensor:
    return self.rest(self.linear(x)) * (1 if self.training else 1 + OFF)


def _without_gradients(self: ByRow, x: Tensor) -> Tensor:
    y = self.rest(self.linear(x))
    return y if torch.is_grad_enabled() else y * off_at(y, 0, -1)


def _input_gradient(self: ByRow, x: Tensor) -> Tensor:
    return self.rest(self.linear(wrong_gradient(x, off_at(x, 0, -1))))


def _input_gradient_of_the_whole_call(self: ByRow, x: Tensor) -> Tensor:
    factor = off_at(x, 0, 37) if len(x) == ROWS else torch.ones(x.shape)
    return self.rest(self.linear(wrong_gradient(x, factor)))


def _weight_gradient(self: ByRow, x: Tensor) -> Tensor:
    weight = wrong_gradient(self.linear.weight, torch.tensor(1 + OFF))
    return self.rest(F.linear(x, weight, self.linear.bias))


# Each is wrong in one way only, and by a thousandth.
WRONG: dict[str, Callable[[ByRow, Tensor], Tensor]] = {
    "last row": _last_row,
    "one row of the whole call": _one_row_of_the_whole_call,
    "one channel": _one_channel,
    "train": _train,
    "eval": _eval,
    "without gradients": _without_gradients,
    "gradient of an input": _input_gradient,
    "gradient of an input of the whole call": _input_gradient_of_the_whole_call,
    "gradient of a weight": _weight_gradient,
}


def backwards(self: ByRow, x: Tensor) -> Tensor:
    """Right, but added in another order."""
    y = F.linear(x.flip(0, 1), self.linear.weight.flip(1)) + self.linear.bias
    return self.rest(y).flip(0)


def candidate(base: type[ByRow], forward: Callable[[ByRow, Tensor], Tensor]) -> type[nn.Module]:
    return type("New", (base,), {"forward": forward})


def problem_of(model: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Problem:
    """A problem of random inputs of these shapes."""
    return Problem(
        name="model",
        path=None,
        source="",
        make_model=model,
        make_inputs=lambda: tuple(torch.randn(shape) for shape in shapes or ((ROWS, FEATURES),)),
        make_init=Arguments,
    )
