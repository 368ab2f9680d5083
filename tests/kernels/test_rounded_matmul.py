"""Matmuls whose fp32 operand is rounded to fp16 first, run without a GPU.

The workspace for the fp16 values holds NaN before the call. Bytes behind it must not change.
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
from fusewright.ir.interpret import fp16_scale
from fusewright.ir.matmul import Extents, MatmulKernel, RawOperand, SplitOperand
from fusewright.schedule.tensor_core import choose_matmul
from fusewright.target.target import Target
from tests.support.matmul_on_host import PLAIN_EPILOGUE, operands, split_rows
from tests.support.tensor_cores_on_host import library_of

CUDA = Target.cuda()

LAYOUTS = ["kk", "fk", "ff", "kf"]  # of a and b: contracted or free index contiguous
UNTOUCHED = 0xFF  # two bytes of it are a NaN
BEHIND = 64
ENTRIES = r"""
#define ENTRY(name, free_major, contracted_rows)                                                  \
  extern "C" int name(void* a, void* hi, void* lo, void* inverse, void* out, void* memory,        \
                      int64_t free, int64_t deep, int64_t layer, int64_t row_stride, int64_t p,   \
                      int64_t q, int64_t r, int64_t batches, int64_t least, int64_t vectors) {    \
    return fw::rounded_matmul<1, 128, free_major, contracted_rows>(                               \
        Epilogue{{{{(float*)out, p}}}}, vectors, fw::RawOperand{(float*)a, free, deep, layer},    \
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
    return library_of("sm90/matmul/sm90_rounded_gemm.cuh", PLAIN_EPILOGUE, ENTRIES)


@dataclass(frozen=True)
class Sizes:
    p: int
    q: int
    r: int
    batches: int


def kernel_of(layout: str, a: Tensor, of: Sizes, symbols: bool = False) -> MatmulKernel:
    """The kernel as a plan describes it; with `symbols` its sizes are dynamic."""
    free, deep = (-2, -1) if layout[0] == "k" else (-1, -2)
    strides = (Dim(a.stride(free)), Dim(a.stride(deep)), Dim(a.stride(0) if a.dim() == 3 else 0))
    p, q, r, batches = (
        Dim(1, (name,)) if symbols else Dim(getattr(of, name))
        for name in ("p", "q", "r", "batches")
    )
    b = SplitOperand("hi", "lo", "inverse", Dim(8), layout[1] == "f")
    return MatmulKernel(
        name="",
        summary="",
        rows=q,
        columns=p,
        contracted=r,
        batches=batches,
        a=RawOperand("a", "float32", *strides),
        b=b,
        epilogue=cast(Any, None),  # nothing here asks for it
        accumulator="",
    )


def matmul(
    layout: str, a: Tensor, b: Tensor, vectors: bool = False, least: int = 0
) -> tuple[Tensor, bool]:
    """result[…][q][p], and whether a was rounded first; every element is visited once."""
    free, deep = (-2, -1) if layout[0] == "k" else (-1, -2)
    of = Sizes(
        a.shape[free], b.shape[-2 if layout[1] == "k" else -1], a.shape[deep],
        math.prod(b.shape[:-2]),
    )  # fmt: skip
    hi, lo, inverse = split_rows(b)
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
    """Both rounded operands, multiplied exactly."""
    of_a, _ = by_depth(layout, a.double(), b.double())
    hi, _, inverse = split_rows(b)
    kept = hi.double() * inverse.double()
    if layout[1] == "f":
        # b's factors go with a.
        of_a = of_a * inverse.double().mT * 2**14
        kept = hi.double().mT / 2**14
    scale = fp16_scale(of_a.abs().amax(-1, keepdim=True).float()).double()
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
    y, rounded = matmul(layout, a, b, vectors=p % 4 == 0)
    assert rounded
    close(y, expected(layout, a, b))
    assert float((y.double() - exact).norm() / exact.norm()) < 8e-4


@pytest.mark.parametrize("layout", ["kk", "kf"])
def test_rows_longer_than_registers_hold(layout: str) -> None:
    a, b, _ = operands(layout, 2, 3, 8300)
    by_depth(layout, a, b)[0][0, 8250] = 1000.0  # the largest, where a row is read twice
    close(matmul(layout, a, b)[0], expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True])
def test_batches(layout: str, shared: bool) -> None:
    a, b, _ = operands(layout, 68, 130, 70, (3,))
    b = b * torch.tensor([1.0, 2.0**20, 2.0**-20])[:, None, None]
    a = a[1] if shared else a * torch.tensor([2.0**-30, 1.0, 2.0**30])[:, None, None]
    close(matmul(layout, a, b, vectors=True)[0], expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("skip", "shift"), [(1, 1), (2, 0), (2, 3)])
def test_any_alignment(layout: str, skip: int, shift: int) -> None:
    """Every second row, rows of odd length, and a first element at any address."""
    p, q, r = 132, 40, 136
    rows, columns = (p, r) if layout[0] == "k" else (r, p)
    base = torch.full((rows * skip, columns + 4 + shift), math.nan)
    a = base[::skip, shift : shift + columns]
    a.copy_(torch.randn(rows, columns))
    _, b, _ = operands(layout, p, q, r)
    close(matmul(layout, a, b)[0], expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_column_has_its_magnitude(layout: str) -> None:
    a, b, _ = operands(layout, 132, 40, 300)
    of_a, of_b = by_depth(layout, a, b)
    of_a.mul_(torch.exp2(torch.linspace(-60, 60, 132))[:, None])
    b.mul_(2.0**-40)
    close(matmul(layout, a, b)[0], of_b.double() @ of_a.double().mT, 6e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_magnitudes_that_change_within_a_row(layout: str) -> None:
    """Blocks of contracted indices from 2^-20 to 2^20, those of b in reverse where rows have
    scales."""
    a, b, _ = operands(layout, 132, 40, 300)
    of_a, of_b = by_depth(layout, a, b)
    sizes = torch.exp2(torch.tensor([-20.0, 7.0, 20.0, -3.0, 12.0])).repeat_interleave(64)[:300]
    of_a.mul_(sizes)
    if layout[1] == "f":
        of_b.div_(sizes)  # rows of b have scales of their own: nothing is lost
    close(matmul(layout, a, b)[0], of_b.double() @ of_a.double().mT, 6e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_zeros(layout: str) -> None:
    a, b, _ = operands(layout, 132, 100, 70)
    of_a, of_b = by_depth(layout, a, b)
    b.mul_(1e-8)
    of_a[::5], of_a[:, ::3], of_b[:, ::4] = 0.0, 0.0, 0.0
    y, _ = matmul(layout, a, b, vectors=True)
    close(y, of_b.double() @ of_a.double().mT, 6e-4)
    assert not y[:, ::5].any()


@pytest.mark.parametrize(
    ("layout", "huge"), [*((each, False) for each in LAYOUTS), ("kk", True), ("fk", True)]
)
@pytest.mark.parametrize("vectors", [False, True])
def test_infinity_and_nan_are_where_they_belong(layout: str, vectors: bool, huge: bool) -> None:
    a, b, _ = operands(layout, 132, 70, 130)
    of_a, of_b = by_depth(layout, a, b)
    of_a[3, 5], of_b[7, 5] = (3e38, -3e38) if huge else (math.inf, -math.inf)
    if not huge:
        of_a[100, 9] = math.nan
    exact, eager = of_b.double() @ of_a.double().mT, of_b @ of_a.mT
    y, _ = matmul(layout, a, b, vectors)
    # Next to the largest float, rounding decides whether a sum overflows.
    largest = torch.finfo(torch.float32).max
    clear = (exact.abs() / largest - 1).abs() > 1e-3
    y_clear, eager_clear = y[clear], eager[clear]
    assert torch.equal(y_clear.isnan(), eager_clear.isnan()) and bool(eager_clear.isinf().any())
    assert torch.equal(y_clear.isinf(), eager_clear.isinf())
    infinite = y_clear.isinf()
    assert torch.equal(y_clear[infinite], eager_clear[infinite])
    others = y.isfinite()
    size = of_b.nan_to_num(posinf=0, neginf=0).abs() @ of_a.nan_to_num(posinf=0, neginf=0).abs().mT
    assert bool(((y.double() - exact).abs() <= 1e-3 * size.double())[others].all())


def test_a_batch_has_its_own_infinities() -> None:
    a, b, _ = operands("kk", 70, 40, 66, (3,))
    a[1, 5, 7] = math.inf
    y, _ = matmul("kk", a, b)
    assert bool(y[1, :, 5].isinf().all()) and int((~y.isfinite()).sum()) == 40


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True])
def test_operands_are_rounded_first_from_enough_rows_on(layout: str, shared: bool) -> None:
    """They are counted over all batches that share one fp16 copy of a."""
    a, b, _ = operands(layout, 40, 30, 66, (2,))
    a = a[0] if shared else a
    of = Sizes(40, 30, 66, 2)
    rows = kernel_of(layout, a, of).rounded_rows.at({})
    assert rows == (60 if shared and layout[1] == "k" else 30)
    of_a, of_b = by_depth(layout, a, b)
    for least, first in ((rows, True), (rows + 1, False)):
        y, rounded = matmul(layout, a, b, least=least)
        assert rounded is first
        close(y, of_b.double() @ of_a.double().mT, 6e-4)


def test_an_empty_sum_is_zero() -> None:
    a, b, _ = operands("ff", 130, 70, 8)
    y, rounded = matmul("ff", a[:0], b[:0])
    assert not y.any() and not rounded


def test_operands_are_rounded_first_where_that_pays() -> None:
    """Reading and writing each element of a is weighed against the time that each row saves."""
    rows = {
        each: rounded_from(
            Extents(each, 8192, 8192), 176, free_major=False, shared=False, target=CUDA
        )
        for each in (128, 512, 1024, 4096, 8192)
    }
    assert rows[128] == 0, "not in sight"
    assert 1024 < rows[1024] < 1200 and 1000 < rows[8192] < 1200
    columns = rounded_from(
        Extents(4096, 8192, 8192), 176, free_major=True, shared=False, target=CUDA
    )
    assert columns > 1.5 * rows[4096], "columns are read twice"
    small = rounded_from(
        Extents(2048, 1024, 1024), 176, free_major=False, shared=False, target=CUDA
    )
    assert small > 1.5 * rows[4096], "launches count"
    batches = Extents(256, 1024, 1024, 64)
    assert 0 < rounded_from(batches, 176, False, shared=True, target=CUDA) < 256 * 64
    assert rounded_from(batches, 176, False, shared=False, target=CUDA) == 0
    assert rounded_from(Extents(64, 4096, 4096, 64), 128, False, True, CUDA) == 0, "empty tiles"
    assert rounded_from(Extents(0, 8192, 8192), 176, False, False, CUDA) == 0


def test_too_few_rows_for_rounding_build_no_second_kernel() -> None:
    a, of = torch.empty(8192, 8192), Sizes(8192, 1024, 8192, 1)
    fixed, open_ = (kernel_of("kk", a, of, symbols) for symbols in (False, True))
    sizes = {"p": 8192, "q": 1024, "r": 8192, "batches": 1}
    assert choose_matmul(fixed, Target.cuda(), {}).rounded_from == 0
    assert choose_matmul(open_, Target.cuda(), sizes).rounded_from > 1024
    enough = kernel_of("kk", a, Sizes(8192, 2048, 8192, 1))
    assert 1024 < choose_matmul(enough, Target.cuda(), {}).rounded_from <= 2048
