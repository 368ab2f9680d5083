"""Inputs that a kernel writer forgets: each gives eager's result or eager's error.

One model meets them all: a pointwise chain, a matmul, a reduction over rows and a broadcast.
Odd calls of it are in test_bad_calls.py, odd surroundings in test_bad_surroundings.py. What needs
a GPU has tests of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.beside_eager import COLUMNS, Pair, answer, assert_alike, pair, randn, trained


@pytest.fixture(name="pair", scope="module")
def fixture() -> Pair:
    return pair()


def moved_by(elements: int) -> Tensor:
    """Rows that begin a few elements behind an aligned address."""
    return randn(100)[elements : elements + 6 * COLUMNS].view(6, COLUMNS)


def overlapping() -> Tensor:
    return randn(40).as_strided((6, COLUMNS), (3, 1))


def filled(value: float) -> Tensor:
    x = randn(6, COLUMNS)
    x[1, 2] = x[4, 7] = value
    return x


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: randn(COLUMNS, 6).t(),
    "rows left out": lambda: randn(12, COLUMNS)[::2],
    "columns left out": lambda: randn(6, 2 * COLUMNS)[:, ::2],
    "columns cut": lambda: randn(6, COLUMNS + 3)[:, 1 : COLUMNS + 1],
    "expanded rows": lambda: randn(1, COLUMNS).expand(6, COLUMNS),
    "expanded columns": lambda: randn(6, 1).expand(6, COLUMNS),
    "a storage offset": lambda: randn(9, COLUMNS)[3:],
    "misaligned by one": lambda: moved_by(1),
    "misaligned by two": lambda: moved_by(2),
    "misaligned by four": lambda: moved_by(4),
    "overlapping": overlapping,
    "flipped": lambda: randn(6, COLUMNS).flip(0),
    "three dimensions, permuted": lambda: randn(COLUMNS, 2, 3).permute(1, 2, 0),
    "channels-last": lambda: randn(2, 3, 4, COLUMNS).contiguous(memory_format=torch.channels_last),
    "channels-last 3d": lambda: randn(2, 3, 2, 2, COLUMNS).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "nine dimensions": lambda: randn(1, 2, 1, 2, 1, 1, 2, 1, COLUMNS),
    "sparse": lambda: randn(6, COLUMNS).relu().to_sparse(),
    "sparse rows": lambda: randn(6, COLUMNS).relu().to_sparse_csr(),
    "a view of a number": lambda: randn().expand(6, COLUMNS),
    "a negative view": lambda: torch.complex(randn(6, COLUMNS), randn(6, COLUMNS)).conj().imag,
}
SIZES: dict[str, Callable[[], Tensor]] = {
    "no rows": lambda: randn(0, COLUMNS),
    "one row": lambda: randn(1, COLUMNS),
    "a prime number of rows": lambda: randn(101, COLUMNS),
    "more than 65,535 rows": lambda: randn(65_537, COLUMNS),
    "one dimension": lambda: randn(COLUMNS),
    "no inner rows": lambda: randn(3, 0, COLUMNS),
    "too few columns": lambda: randn(6, COLUMNS - 1),
    "no columns": lambda: randn(6, 0),
    "no dimensions": lambda: randn(),
    "more rows than memory": lambda: randn(1, COLUMNS).expand(2**42, COLUMNS),
}
VALUES: dict[str, Callable[[], Tensor]] = {
    "nan": lambda: filled(math.nan),
    "infinity": lambda: filled(math.inf),
    "minus infinity": lambda: filled(-math.inf),
    "a denormal number": lambda: filled(1e-41),
    "minus zero": lambda: filled(-0.0),
    "overflow": lambda: filled(3e38),
    "all equal": lambda: torch.full((6, COLUMNS), 0.25),
    "all zero": lambda: torch.zeros(6, COLUMNS),
}
DTYPES: dict[str, Callable[[], Tensor]] = {
    str(dtype).removeprefix("torch."): lambda dtype=dtype: randn(6, COLUMNS).to(dtype)
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.bool,
    )
}
DEVICES: dict[str, Callable[[], Tensor]] = {"meta": lambda: randn(6, COLUMNS).to("meta")}
INPUTS = {
    f"{kind}: {name}": make
    for kind, rows in (
        ("layout", LAYOUTS),
        ("size", SIZES),
        ("value", VALUES),
        ("dtype", DTYPES),
        ("device", DEVICES),
    )
    for name, make in rows.items()
}


@pytest.mark.parametrize("name", INPUTS)
def test_results_and_errors_are_eagers(pair: Pair, name: str) -> None:
    model, fast = pair
    make = INPUTS[name]
    for run in (trained, lambda module, x: [module(x).detach()]):
        expected = answer(lambda run=run: run(model, make()))
        assert_alike(answer(lambda run=run: run(fast, make())), expected)
    with torch.no_grad():
        expected = answer(lambda: [model(make())])
        assert_alike(answer(lambda: [fast(make())]), expected)


def test_strides_of_results(pair: Pair) -> None:
    model, fast = pair
    for name, make in LAYOUTS.items():
        x = make()
        if x.dim() == 2 and x.layout is torch.strided:
            assert fast(make()).stride() == model(make()).stride(), name
