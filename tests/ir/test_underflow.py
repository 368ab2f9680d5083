"""Exponentials whose results are denormal or 0: as exact as others, and no slower."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import mpmath
import pytest
import torch

import fusewright
from fusewright.kinds.registry import render
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support.loop_runs import compile_source
from tests.support.single_operators import N, pointwise

OPERATORS = ("exp", "exp2")
# From the first argument whose result is denormal, or a little above it, to far below the last one.
RANGES = {("exp", "float32"): (-80, -110), ("exp2", "float32"): (-120, -160)}
RANGES |= {("exp", "float64"): (-700, -750), ("exp2", "float64"): (-1020, -1080)}
FAR_BELOW = (-175.0, -200.0, -1e4, -1e9, -3e38, float("-inf"))


@functools.cache
def library(dtype: str) -> ctypes.CDLL:
    target = Target.host()
    loops = [pointwise(op, dtype) for op in OPERATORS]
    return compile_source(render([(loop, choose(loop, target, {})) for loop in loops], target))


def applied(op: str, x: torch.Tensor) -> torch.Tensor:
    dtype = str(x.dtype).removeprefix("torch.")
    out = torch.empty_like(x)
    entry = getattr(library(dtype), f"op_{op}_{dtype}")
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (x, out)]
    assert entry(*pointers, None, ctypes.c_int(1), None) == 0
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", OPERATORS)
def test_results_that_underflow(op: str, dtype: str) -> None:
    first, last = RANGES[op, dtype]
    kind = getattr(torch, dtype)
    x = torch.linspace(first, last, N, dtype=torch.float64).to(kind)
    ours = applied(op, x)
    exact_of = mpmath.exp if op == "exp" else functools.partial(mpmath.power, 2)
    with mpmath.workdps(40):
        for given, found in zip(x.tolist(), ours.tolist(), strict=True):
            exact = exact_of(mpmath.mpf(given))
            least = mpmath.mpf(2) ** (-149 if dtype == "float32" else -1074)
            bits = 22 if dtype == "float32" else 51
            room = least * 0.5 + exact * mpmath.mpf(2) ** -bits
            assert abs(mpmath.mpf(found) - exact) <= room, (given, found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", OPERATORS)
def test_results_far_below_every_number(op: str, dtype: str) -> None:
    below = [each if dtype == "float32" else 7 * each for each in FAR_BELOW]
    given = torch.full((N,), -1.0, dtype=getattr(torch, dtype))
    given[: len(below)] = torch.tensor(below, dtype=given.dtype)
    given[len(below)] = float("nan")
    ours = applied(op, given)
    assert ours[: len(below)].tolist() == [0.0] * len(below)
    assert not ours[: len(below)].signbit().any()
    assert ours[len(below)].isnan()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.by_the_clock
def test_masked_scores_cost_what_others_do() -> None:
    """A result that underflows took the processor some 150 cycles: 7 to 17 times the time."""
    model = torch.nn.Softmax(-1)
    scores = torch.randn(64, 1000)
    masked = scores.masked_fill(torch.rand(64, 1000) < 0.3, -1e9)
    fast = fusewright.optimize(model, scores)
    torch.testing.assert_close(fast(masked), model(masked))
    least = {"plain": float("inf"), "masked": float("inf")}
    with torch.no_grad():
        for _ in range(400):  # other processes only make some of them longer
            least["plain"] = min(least["plain"], _seconds(lambda: fast(scores)))
            least["masked"] = min(least["masked"], _seconds(lambda: fast(masked)))
    assert least["masked"] < 3 * least["plain"]
