"""Conversions from floating point to integers beside eager, for numbers that do not fit, too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright

_VALUES = (3e9, 2.0**31, 2.0**31 - 200, 2.0**32 + 5000, -3e9, 300.5, -129.0, 4e4, -4e4, 1e10 + 7)
_SPECIAL = (-0.5, 0.5, -0.0, 1e20, -1e20, math.inf, -math.inf, math.nan)


class Convert(nn.Module):
    """To an integer, and back."""

    def __init__(self, kind: torch.dtype, back: torch.dtype) -> None:
        super().__init__()
        self.kind, self.back = kind, back

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x.to(self.kind)
        return whole, 1 / whole.to(self.back)


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("given", ["float32", "float64", "bfloat16"])
def test_integers_are_those_of_eager(given: str, kind: str) -> None:
    source, target = getattr(torch, given), getattr(torch, kind)
    model = Convert(target, source)
    x = torch.tensor([*_VALUES, *_SPECIAL], dtype=source)
    fast: Any = fusewright.optimize(model, (x,), modes=("eval",)).eval()
    for found, expected in zip(fast(x), model(x), strict=True):
        assert torch.equal(found, expected), (found, expected)
