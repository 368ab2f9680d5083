"""Many small models as one, and an optimized model with its plans.

Otherwise each test would start g++ for every case, and capture every case twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from unittest import mock

from torch import Tensor, nn

import fusewright
from fusewright.compile import solution
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.emit.bundle import ProgramPlans


class SideBySide(nn.Module):
    """Functions of one tensor each: the model has as many inputs and outputs."""

    def __init__(self, functions: Iterable[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = tuple(functions)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(each(x) for each, x in zip(self.functions, inputs, strict=True))


def optimized(
    model: nn.Module, *inputs: Tensor, mode: str = "train"
) -> tuple[nn.Module, ProgramPlans]:
    """A copy of the model as `optimize` gives it, and what was planned for it."""
    found: list[Prepared] = []

    def kept(*args: object, **how: object) -> Prepared:
        found.append(prepare(*args, **how))  # type: ignore[arg-type]
        return found[-1]

    with mock.patch.object(solution, "prepare", kept):
        fast = fusewright.optimize(copy.deepcopy(model), inputs, modes=(mode,))
    return fast, found[0].modes[0]
