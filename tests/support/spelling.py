"""Two spellings of the same thing, and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.plan_content import PARTS

Run = Callable[..., Any]
Shape = tuple[int, ...]
ROWS, IMAGES, STEPS = (6, 40), (3, 8, 10, 12), (3, 5, 40)
TWO, THREE = (ROWS,) * 2, (ROWS,) * 3


class Spelling(nn.Module):
    """A function of the module and its arguments, with the layers and parameters that it uses."""

    def __init__(self, run: Run, held: Mapping[str, Any]) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))

    def forward(self, *args: Tensor) -> Any:
        return self.run(self, *args)


@dataclass(frozen=True)
class Pair:
    """Two spellings. `same` are the graphs whose plans are equal; the others have the same
    structure, because of `why`."""

    name: str
    first: Run
    second: Run
    shapes: tuple[Shape, ...] = (ROWS,)
    held: Callable[[], Mapping[str, Any]] = dict
    same: tuple[str, ...] = PARTS
    why: str = ""


@dataclass
class Table:
    pairs: list[Pair] = field(default_factory=list)

    def add(self, name: str, first: Run, second: Run, *shapes: Shape, **more: Any) -> None:
        self.pairs.append(Pair(name, first, second, shapes or (ROWS,), **more))


FORWARD: tuple[str, ...] = ("inference", "forward")
INFERENCE: tuple[str, ...] = ("inference",)
NOTHING: tuple[str, ...] = ()
TIES = "their gradients differ at a tie"
ROUNDING = "they are rounded differently"
NAN = "they differ for NaN"
OVERFLOW = "one of them overflows earlier"


def bias(size: int = 40) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"b": torch.linspace(-1, 1, size)}


def layer(make: Callable[[], nn.Module]) -> Callable[[], Mapping[str, Any]]:
    def held() -> Mapping[str, Any]:
        torch.manual_seed(4)
        return {"layer": make()}

    return held


def weights() -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"w": torch.randn(24, 40, generator=generator), "b": torch.linspace(-1, 1, 24)}
