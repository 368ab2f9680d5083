"""Conversions beside eager: to integers, for numbers that do not fit, too, and to 16-bit floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from tests.support.models import Lambda

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


def _around(kind: torch.dtype) -> Tensor:
    """All numbers of a 16-bit type, those halfway between two of them, and their neighbours."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind).double()
    finite = every[every.isfinite()].sort().values
    ties = ((finite[1:] + finite[:-1]) / 2).float()
    near = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (math.inf, -math.inf)]
    ends = torch.tensor([1e-45, -1e-45, 3.4e38, 65519.9, 65520.0, math.inf, -math.inf, math.nan])
    return torch.cat([every.float(), ties, *near, ends])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_floats_are_rounded_to_even(kind: torch.dtype) -> None:
    """Stored in runs, with gaps, and once a row."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.abs() * x.sign()
        rows = torch.stack([y, torch.zeros_like(y)], 1).sum(1)
        return y.to(kind), y.view(4, -1).t().to(kind).contiguous(), rows.to(kind)

    x = _around(kind)
    x = x[: len(x) // 4 * 4]
    fast = fusewright.optimize(Lambda(function), (x,), modes=("eval",)).eval()
    for found, expected in zip(fast(x), function(x), strict=True):
        numbers = ~expected.isnan()
        assert torch.equal(found.isnan(), ~numbers)
        assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
