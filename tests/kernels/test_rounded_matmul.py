"""Products whose fp32 operand is rounded to halves first, run without a GPU.

The memory for the halves is NaN before, and what lies behind it must stay as it was.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fusewright.cost.matmul import rounded_from
from fusewright.ir.graph import Dim
from fusewright.ir.interpret import half_scale
from fusewright.ir.matmul import Extents, ProductKernel, RawOperand, SplitOperand
from fusewright.schedule.tensor_core import choose_product
from fusewright.target.target import Target
from tests.kernels.test_fp16x3_matmul import PLAIN, halves, operands
from tests.support.tensor_cores_on_host import library_of

LAYOUTS = ["kk", "fk", "ff", "kf"]  # of a and b: contracted or free index contiguous
UNTOUCHED = 0xFF  # two bytes of it are a NaN
BEHIND = 64
ENTRIES = r"""
#define ENTRY(name, free_major, contracted_rows)                                                 \
  extern "C" int name(void* a, void* hi, void* lo, void* inverse, void* out, void* memory,        \
                      int64_t free, int64_t deep, int64_t layer, int64_t row_stride, int64_t p,   \
                      int64_t q, int64_t r, int64_t batches, int64_t least, int64_t vectors) {    \
    return fw::rounded_product<1, 128, free_major, contracted_rows>(                              \
        End{{{{(float*)out, p}}}}, vectors, fw::RawOperand{(float*)a, free, deep, layer},         \
        {(fw::half*)hi, (fw::half*)lo, (float*)inverse, row_stride}, {p, q, r, batches}, least,   \
        memory, 0, nullptr);                                                                      \
  }
ENTRY(kk, false, false)
ENTRY(fk, true, false)
ENTRY(ff, true, true)
ENTRY(kf, false, true)
"""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels' own text, their instructions replaced by the stand-ins."""
    return library_of("sm90/matmul/sm90_rounded_gemm.cuh", PLAIN, ENTRIES)


@dataclass(frozen=True)
class Sizes:
    p: int
    q: int
    r: int
    batches: int


def kernel_of(layout: str, a: Tensor, of: Sizes, symbols: bool = False) -> ProductKernel:
    """What the plan would say of it; with `symbols` its sizes are known when it runs."""
    free, deep = (-2, -1) if layout[0] == "k" else (-1, -2)
    strides = (Dim(a.stride(free)), Dim(a.stride(deep)), Dim(a.stride(0) if a.dim() == 3 else 0))
    p, q, r, batches = (
        Dim(1, (name,)) if symbols else Dim(getattr(of, name))
        for name in ("p", "q", "r", "batches")
    )
    b = SplitOperand("hi", "lo", "inverse", Dim(8), layout[1] == "f")
    return ProductKernel(
        name="",
        summary="",
        rows=q,
        columns=p,
        contracted=r,
        batches=batches,
        a=RawOperand("a", "float32", *strides),
        b=b,
        epilogue=cast(Any, None),  # nothing here asks for it
        product="",
    )


def product(
    layout: str, a: Tensor, b: Tensor, vectors: bool = False, least: int = 0
) -> tuple[Tensor, bool]:
    """result[…][q][p], and whether a was rounded first; every element is visited once."""
    free, deep = (-2, -1) if layout[0] == "k" else (-1, -2)
    of = Sizes(
        a.shape[free], b.shape[-2 if layout[1] == "k" else -1], a.shape[deep],
        math.prod(b.shape[:-2]),
    )  # fmt: skip
    hi, lo, inverse = halves(b)
    out = torch.full((*b.shape[:-2], of.q, of.p), 12345.0)
    sizes = {"p": of.p, "q": of.q, "r": of.r, "batches": of.batches}
    room = sum(each.at(sizes) for each in kernel_of(layout, a, of).rounded_bytes)
    memory = torch.full((room + BEHIND,), UNTOUCHED, dtype=torch.uint8)
    pointers = [each.data_ptr() for each in (a, hi, lo, inverse, out, memory)]
    strides = (a.stride(free), a.stride(deep), a.stride(0) if a.dim() == 3 else 0, hi.stride(-2))
    numbers = (*strides, of.p, of.q, of.r, of.batches, least, int(vectors))
    code = getattr(library(), layout)(
        *map(ctypes.c_void_p, pointers), *map(ctypes.c_int64, numbers)
    )
    assert code == 0 and not (out == 12345).any()
    assert (memory[room:] == UNTOUCHED).all(), "beyond the memory"
    return out, not bool((memory == UNTOUCHED).all())


def by_depth(layout: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands as [free][contracted]; views."""
    return a if layout[0] == "k" else a.mT, b if layout[1] == "k" else b.mT


def expected(layout: str, a: Tensor, b: Tensor) -> Tensor:
    """What is left of both operands, multiplied exactly."""
    of_a, _ = by_depth(layout, a.double(), b.double())
    hi, _, inverse = halves(b)
    kept = hi.double() * inverse.double()
    if layout[1] == "f":
        # b's factors go with a.
        of_a = of_a * inverse.double().mT * 2**14
        kept = hi.double().mT / 2**14
    scale = half_scale(of_a.abs().amax(-1, keepdim=True).float()).double()
    of_a = (of_a * scale).half().double() / scale
    return kept @ of_a.mT


def close(y: Tensor, exact: Tensor, tolerance: float = 4e-6) -> None:
    """Each column has its own magnitude."""
    error = (y.double() - exact).norm(dim=-2) / exact.norm(dim=-2).clamp(min=1e-300)
    assert float(error.max()) < tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("p", "q", "r"), [(132, 300, 132), (1, 1, 1), (129, 5, 67), (260, 40, 300), (6, 3, 2050)]
)
def test_every_layout_and_edge(layout: str, p: int, q: int, r: int) -> None:
    torch.manual_seed(p + q + r)
    a, b, exact = operands(layout, p, q, r)
    y, rounded = product(layout, a, b, vectors=p % 4 == 0)
    assert rounded
    close(y, expected(layout, a, b))
    assert float((y.double() - exact).norm() / exact.norm()) < 8e-4


@pytest.mark.parametrize("layout", ["kk", "kf"])
def test_rows_that_are_longer_than_registers_hold(layout: str) -> None:
    a, b, _ = operands(layout, 2, 3, 8300)
    by_depth(layout, a, b)[0][0, 8250] = 1000.0  # the largest, where a row is read twice
    close(product(layout, a, b)[0], expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True])
def test_batches(layout: str, shared: bool) -> None:
    a, b, _ = operands(layout, 68, 130, 70, (3,))
    b = b * torch.tensor([1.0, 2.0**20, 2.0**-20])[:, None, None]
    a = a[1] if shared else a * torch.tensor([2.0**-30, 1.0, 2.0**30])[:, None, None]
    close(product(layout, a, b, vectors=True)[0], expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("skip", "shift"), [(1, 1), (2, 0), (2, 3)])
def test_any_alignment(layout: str, skip: int, shift: int) -> None:
    """Every second row, rows of an odd length, a first number that lies anywhere."""
    p, q, r = 132, 40, 136
    rows, columns = (p, r) if layout[0] == "k" else (r, p)
    base = torch.full((rows * skip, columns + 4 + shift), math.nan)
    a = base[::skip, shift : shift + columns]
    a.copy_(torch.randn(rows, columns))
    _, b, _ = operands(layout, p, q, r)
    close(product(layout, a, b)[0], expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_column_has_its_magnitude(layout: str) -> None:
    a, b, _ = operands(layout, 132, 40, 300)
    of_a, of_b = by_depth(layout, a, b)
    of_a.mul_(torch.exp2(torch.linspace(-60, 60, 132))[:, None])
    b.mul_(2.0**-40)
    close(product(layout, a, b)[0], of_b.double() @ of_a.double().mT, 6e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_magnitudes_that_change_within_a_row(layout: str) -> None:
    """Blocks of contracted indices from 2^-20 to 2^20; b the other way where rows have scales."""
    a, b, _ = operands(layout, 132, 40, 300)
    of_a, of_b = by_depth(layout, a, b)
    sizes = torch.exp2(torch.tensor([-20.0, 7.0, 20.0, -3.0, 12.0])).repeat_interleave(64)[:300]
    of_a.mul_(sizes)
    if layout[1] == "f":
        of_b.div_(sizes)  # rows of b have scales of their own: no product is lost
    close(product(layout, a, b)[0], of_b.double() @ of_a.double().mT, 6e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros(layout: str) -> None:
    a, b, _ = operands(layout, 132, 100, 70)
    of_a, of_b = by_depth(layout, a, b)
    b.mul_(1e-8)
    of_a[::5], of_a[:, ::3], of_b[:, ::4] = 0.0, 0.0, 0.0
    y, _ = product(layout, a, b, vectors=True)
    close(y, of_b.double() @ of_a.double().mT, 6e-4)
    assert not y[:, ::5].any()


@pytest.mark.parametrize(
    ("layout", "huge"), [*((each, False) for each in LAYOUTS), ("kk", True), ("fk", True)]
)
@pytest.mark.parametrize("vectors", [False, True])
def test_what_is_not_finite_is_where_it_belongs(layout: str, vectors: bool, huge: bool) -> None:
    a, b, _ = operands(layout, 132, 70, 130)
    of_a, of_b = by_depth(layout, a, b)
    of_a[3, 5], of_b[7, 5] = (3e38, -3e38) if huge else (math.inf, -math.inf)
    if not huge:
        of_a[100, 9] = math.nan
    exact, eager = of_b.double() @ of_a.double().mT, of_b @ of_a.mT
    y, _ = product(layout, a, b, vectors)
    assert torch.equal(y.isnan(), eager.isnan()) and torch.equal(y.isinf(), eager.isinf())
    assert torch.equal(y[y.isinf()], eager[eager.isinf()]) and bool(eager.isinf().any())
    others = y.isfinite()
    size = of_b.nan_to_num(posinf=0, neginf=0).abs() @ of_a.nan_to_num(posinf=0, neginf=0).abs().mT
    assert bool(((y.double() - exact).abs() <= 1e-3 * size.double())[others].all())


def test_a_batch_has_its_own_infinities() -> None:
    a, b, _ = operands("kk", 70, 40, 66, (3,))
    a[1, 5, 7] = math.inf
    y, _ = product("kk", a, b)
    assert bool(y[1, :, 5].isinf().all()) and int((~y.isfinite()).sum()) == 40


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True])
def test_enough_rows_have_it_rounded_first(layout: str, shared: bool) -> None:
    """The rows that one a as halves is good for: all batches', if none has factors of its own."""
    a, b, _ = operands(layout, 40, 30, 66, (2,))
    a = a[0] if shared else a
    of = Sizes(40, 30, 66, 2)
    rows = kernel_of(layout, a, of).rounded_rows.at({})
    assert rows == (60 if shared and layout[1] == "k" else 30)
    of_a, of_b = by_depth(layout, a, b)
    for least, first in ((rows, True), (rows + 1, False)):
        y, rounded = product(layout, a, b, least=least)
        assert rounded is first
        close(y, of_b.double() @ of_a.double().mT, 6e-4)


def test_a_sum_of_nothing_is_zero() -> None:
    a, b, _ = operands("ff", 130, 70, 8)
    y, rounded = product("ff", a[:0], b[:0])
    assert not y.any() and not rounded


def test_it_is_rounded_first_where_that_pays() -> None:
    """By reading and writing each number of a, against what a number saves in each row."""
    rows = {
        each: rounded_from(Extents(each, 8192, 8192), 176, free_major=False, shared=False)
        for each in (128, 512, 1024, 4096, 8192)
    }
    assert rows[128] == 0, "not in sight"
    assert 1024 < rows[1024] < 1200 and 1000 < rows[8192] < 1200
    columns = rounded_from(Extents(4096, 8192, 8192), 176, free_major=True, shared=False)
    assert columns > 1.5 * rows[4096], "columns are read twice"
    small = rounded_from(Extents(2048, 1024, 1024), 176, free_major=False, shared=False)
    assert small > 1.5 * rows[4096], "launches count"
    batches = Extents(256, 1024, 1024, 64)
    assert 0 < rounded_from(batches, 176, False, shared=True) < 256 * 64
    assert rounded_from(batches, 176, False, shared=False) == 0
    assert rounded_from(Extents(64, 4096, 4096, 64), 128, False, True) == 0, "empty tiles"
    assert rounded_from(Extents(0, 8192, 8192), 176, False, False) == 0


def test_rows_that_can_never_be_enough_build_no_second_kernel() -> None:
    a, of = torch.empty(8192, 8192), Sizes(8192, 1024, 8192, 1)
    fixed, open_ = (kernel_of("kk", a, of, symbols) for symbols in (False, True))
    sizes = {"p": 8192, "q": 1024, "r": 8192, "batches": 1}
    assert choose_product(fixed, Target.cuda(), {}).rounded_from == 0
    assert choose_product(open_, Target.cuda(), sizes).rounded_from > 1024
    enough = kernel_of("kk", a, Sizes(8192, 2048, 8192, 1))
    assert 1024 < choose_product(enough, Target.cuda(), {}).rounded_from <= 2048
