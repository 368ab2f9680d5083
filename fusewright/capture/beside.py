"""What forward reads and PyTorch's Dynamo does not guard, though a call can look at it cheaply.

Before PyTorch 2.12, Dynamo notices neither a new value of an enclosed variable nor a change of
`requires_grad`. A call by way of Dynamo then goes to a compiled function of its own for each state
of these things.
"""

from __future__ import annotations

import math
import types
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusewright.capture.reads import CODE, is_immutable


@dataclass(frozen=True)
class Beside:
    """`cells` are enclosed variables; with `gradients`, forward may ask whether a tensor of the
    module requires gradients."""

    cells: tuple[types.CellType, ...] = ()
    gradients: bool = False

    def state(self, module: nn.Module) -> Hashable:
        """What a call finds there. Equal only if forward does the same."""
        if not self.cells and not self.gradients:
            return ()
        found = tuple([_known(content(each)) for each in self.cells])
        return (found, _gradients(module)) if self.gradients else (found,)


NOTHING = Beside()


def content(cell: types.CellType) -> Any:
    """What an enclosed variable holds; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_plain(value: Any) -> bool:
    """Whether two looks tell that a value is as before. A list may have changed inside."""
    return isinstance(value, CODE) or is_immutable(value)


def _known(value: Any) -> Hashable:
    """1, 1.0 and True are equal, as are 0.0 and -0.0, and are not the same to a program."""
    if isinstance(value, tuple):
        return (type(value), *map(_known, value))
    if isinstance(value, frozenset):
        return (type(value), frozenset(map(_known, value)))
    if isinstance(value, float | complex):
        return (type(value), repr(value))
    if isinstance(value, CODE):
        return Same(value)
    return (type(value), value) if is_plain(value) else object()


class Zeros:
    """Numbers of a module that Dynamo compares by `==`, under its names: it takes -0.0 for 0.0."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[str, types.CodeType, tuple[bool, ...]]] = {}

    def add(self, own: str, name: str, value: Any) -> None:
        """Calls must find zeros of these signs there. `own` is the local name of the module."""
        negative = negative_zeros(value)
        if negative and name.startswith(f"L[{own!r}]"):
            known = (own, compile(name, "a guard", "eval"), negative)
            self._found.setdefault((name, len(negative)), known)

    def fit(self, module: nn.Module) -> bool:
        for own, code, negative in self._found.values():
            try:
                now = negative_zeros(eval(code, {"L": {own: module}}))
            except (LookupError, AttributeError, TypeError):  # Dynamo notices that
                continue
            if now != negative and len(now) == len(negative):
                return False
        return True


def negative_zeros(value: Any) -> tuple[bool, ...]:
    """Which of the zeros in a number or a tuple are negative."""
    if isinstance(value, float):
        return (math.copysign(1.0, value) < 0,) if value == 0 else ()
    if isinstance(value, complex):
        return (*negative_zeros(value.real), *negative_zeros(value.imag))
    if isinstance(value, tuple):
        return tuple([zero for each in value for zero in negative_zeros(each)])
    return ()


class Same:
    """A key that is equal only for the same object, and keeps it alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def together(found: Iterable[Beside]) -> Beside:
    """All of these."""
    every = tuple(found)
    cells = {id(cell): cell for each in every for cell in each.cells}
    return Beside(tuple(cells.values()), any(each.gradients for each in every))


def _gradients(module: nn.Module) -> tuple[bool, ...]:
    """Which tensors of the module require gradients, those in plain attributes included."""
    values = [each for inner in module.modules() for each in vars(inner).values()]
    loose = [each for each in values if isinstance(each, torch.Tensor)]
    held = [*module.parameters(), *module.buffers(), *loose]
    return tuple([each.requires_grad for each in held])
