"""The fp16x3 matmul kernel, run without a GPU: g++, fibers and tests/support/sm90_on_host.hpp.

Every index, swizzle, fragment, edge and barrier phase is tested. nvcc's code, the memory model and
the rounding of tensor cores are not: tests/gpu tests these.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusewright.codegen.matmul import COUNT_BYTES
from fusewright.cost.matmul import parts_of
from fusewright.ir.matmul import Extents
from fusewright.target.facts import H200
from fusewright.target.target import Target
from tests.support.matmul_on_host import PLAIN_EPILOGUE, operands, split_rows
from tests.support.tensor_cores_on_host import library_of

ENTRIES = r"""
#define ENTRY(name, rows, free_major, contracted_rows)                                            \
  extern "C" int name(void* a, void* hi, void* lo, void* inverse, void* out, int64_t free,        \
                      int64_t deep, int64_t layer, int64_t row_stride, int64_t p, int64_t q,      \
                      int64_t r, int64_t batches, int64_t terms, int64_t vectors, void* memory,   \
                      int64_t bytes) {                                                            \
    using Parts = fw::SplitKParts;                                                                \
    const auto run = terms == 1                                                                   \
        ? fw::fp16x3_matmul<1, rows, free_major, contracted_rows, Epilogue, Parts>                \
        : fw::fp16x3_matmul<3, rows, free_major, contracted_rows, Epilogue, Parts>;               \
    return run(                                                                                   \
        Epilogue{{{{(float*)out, p}}}}, vectors, fw::RawOperand{(float*)a, free, deep, layer},    \
        {(fw::half*)hi, (fw::half*)lo, (float*)inverse, row_stride}, {p, q, r, batches}, 0,       \
        nullptr, Parts{memory, bytes});                                                           \
  }
ENTRY(kk_128, 128, false, false)
ENTRY(fk_128, 128, true, false)
ENTRY(ff_128, 128, true, true)
ENTRY(kf_128, 128, false, true)
ENTRY(kk_176, 176, false, false)
ENTRY(fk_176, 176, true, false)
ENTRY(ff_176, 176, true, true)
ENTRY(kf_176, 176, false, true)
"""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel's own text, its instructions replaced by the stand-ins."""
    return library_of("sm90/matmul/sm90_fp16x3_gemm.cuh", PLAIN_EPILOGUE, ENTRIES)


def matmul(
    layout: str, tile: int, a: Tensor, b: Tensor, terms: int, vectors: bool, shared_tiles: int = 0
) -> Tensor:
    """result[…][q][p]; every element must be visited once."""
    free, deep = (-2, -1) if layout[0] == "k" else (-1, -2)
    p, r = a.shape[free], a.shape[deep]
    q = b.shape[-2 if layout[1] == "k" else -1]
    batches = b.shape[:-2]
    hi, lo, inverse = split_rows(b)
    out = torch.full((*batches, q, p), 12345.0)
    pointers = [each.data_ptr() for each in (a, hi, lo, inverse, out)]
    strides = (a.stride(free), a.stride(deep), a.stride(0) if a.dim() == 3 else 0, hi.stride(-2))
    numbers = (*strides, p, q, r, math.prod(batches), terms, int(vectors))
    entry = getattr(library(), f"{layout}_{tile}")
    rows = tile if terms == 3 or tile == 128 else 256
    room = COUNT_BYTES + shared_tiles * 4 * rows * 128 if shared_tiles else 0
    memory = torch.full((room + 64,), 111, dtype=torch.uint8)
    held = (ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(room))
    code = entry(*map(ctypes.c_void_p, pointers), *map(ctypes.c_int64, numbers), *held)
    assert code == 0 and bool((memory[room:] == 111).all())
    assert not (out == 12345).any()
    return out


@pytest.mark.parametrize("tile", [128, 176])
@pytest.mark.parametrize("layout", ["kk", "fk", "ff", "kf"])
@pytest.mark.parametrize(
    ("p", "q", "r"),
    [(132, 180, 132), (260, 356, 64), (1, 1, 1), (129, 5, 67), (64, 200, 192), (400, 370, 68)],
)
def test_every_layout_and_edge(layout: str, tile: int, p: int, q: int, r: int) -> None:
    torch.manual_seed(p + q + r)
    a, b, exact = operands(layout, p, q, r)
    y = matmul(layout, tile, a, b, 3, vectors=p % 4 == 0)
    assert float((y.double() - exact).norm() / exact.norm()) < 4e-7


@pytest.mark.parametrize("layout", ["kk", "fk", "ff", "kf"])
@pytest.mark.parametrize(("p", "q", "r"), [(132, 180, 132), (65, 3, 67), (64, 64, 64)])
@pytest.mark.parametrize("shared", [False, True])
def test_batches(layout: str, p: int, q: int, r: int, shared: bool) -> None:
    torch.manual_seed(p + q + r)
    a, b, exact = operands(layout, p, q, r, (5,))
    if shared:
        a = a[2]
        left, right = b if layout[1] == "k" else b.mT, a.t() if layout[0] == "k" else a
        exact = left.double() @ right.double()
    y = matmul(layout, 128, a, b, 3, vectors=p % 4 == 0)
    assert float((y.double() - exact).norm() / exact.norm()) < 4e-7


@pytest.mark.parametrize("terms", [1, 3])
def test_a_batch_has_its_own_infinities(terms: int) -> None:
    a, b, _ = operands("kk", 70, 40, 66, (3,))
    a[1, 5, 7] = math.inf
    y = matmul("kk", 128, a, b, terms, vectors=False)
    assert bool(y[1, :, 5].isinf().all()) and int((~y.isfinite()).sum()) == 40


@pytest.mark.parametrize("layout", ["kk", "fk", "ff", "kf"])
@pytest.mark.parametrize(("p", "q", "r"), [(140, 270, 130), (132, 5, 300), (1, 1, 1)])
def test_one_term_is_as_exact_as_fp16(layout: str, p: int, q: int, r: int) -> None:
    a, b, exact = operands(layout, p, q, r)
    y = matmul(layout, 128, a, b, 1, vectors=p % 4 == 0)
    error = (y.double() - exact).norm() / exact.norm()
    assert (5e-5 if p > 1 else 0) < float(error) < 6e-4


@pytest.mark.parametrize("layout", ["kk", "ff"])
def test_one_term_follows_rows_that_grow(layout: str) -> None:
    """Each block of 64 is a thousand times the one before. Zeros come first, smaller values
    last."""
    a, b, _ = operands(layout, 132, 40, 300)
    sizes = torch.tensor([0.0, 1.0, 2.0**12, 2.0**24, 2.0**-10]).repeat_interleave(64)[:300]
    a = a * (sizes if layout[0] == "k" else sizes[:, None])
    a[5 if layout[0] == "k" else slice(None), slice(None) if layout[0] == "k" else 5] *= 2.0**70
    left, right = b if layout[1] == "k" else b.t(), a.t() if layout[0] == "k" else a
    exact = left.double() @ right.double()
    y = matmul(layout, 128, a, b, 1, vectors=True)
    error = (y.double() - exact).norm(dim=0) / exact.norm(dim=0)
    assert float(error.max()) < 6e-4


def test_an_empty_sum_is_zero() -> None:
    a, b, _ = operands("ff", 130, 70, 8)
    assert not matmul("ff", 176, a[:0], b[:0], 3, vectors=False).any()


@pytest.mark.parametrize(
    ("layout", "huge"), [("kk", False), ("fk", False), ("ff", False), ("kk", True), ("fk", True)]
)
@pytest.mark.parametrize("vectors", [False, True])
def test_infinity_and_nan_are_where_they_belong(layout: str, vectors: bool, huge: bool) -> None:
    a, b, _ = operands(layout, 132, 70, 130)
    by_depth = (a if layout[0] == "k" else a.t(), b if layout[1] == "k" else b.t())
    for each, place, number in zip(by_depth, (3, 7), (1.0, -1.0), strict=True):
        each[place, 5] = number * (3e38 if huge else math.inf)
    if not huge:
        by_depth[0][100, 9] = math.nan
    left = b if layout[1] == "k" else b.t()
    eager = left @ (a.t() if layout[0] == "k" else a)
    y = matmul(layout, 128, a, b, 3, vectors)
    assert torch.equal(y.isnan(), eager.isnan()) and torch.equal(y.isinf(), eager.isinf())
    assert torch.equal(y[y.isinf()], eager[eager.isinf()])


def test_small_values_keep_their_precision() -> None:
    a, b, exact = operands("ff", 132, 100, 130)
    y = matmul("ff", 128, a * 2.0**-60, b * 2.0**-58, 3, vectors=True)
    tiny = exact * 2.0**-118
    assert float((y.double() - tiny).norm() / tiny.norm()) < 4e-7


@pytest.mark.parametrize("terms", [1, 3])
def test_rows_of_zeros_do_not_set_the_scale_of_others(terms: int) -> None:
    """Such as masked gradients among small ones."""
    a, b, _ = operands("ff", 132, 100, 70)
    b = b * 1e-8
    b[::3] = 0.0
    exact = b.double().t() @ a.double()
    y = matmul("ff", 128, a, b, terms, vectors=True)
    assert float((y.double() - exact).norm() / exact.norm()) < (4e-4 if terms == 1 else 4e-7)


def test_long_sums_are_added_in_parts() -> None:
    a, b = torch.rand(128, 64 * 130), torch.rand(16, 64 * 130)
    exact = b.double() @ a.double().t()
    y = matmul("kk", 128, a, b, 3, vectors=True)
    assert float((y.double() - exact).norm() / exact.norm()) < 2e-7


@pytest.mark.sample(3)
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("layout", ["kk", "fk", "ff", "kf"])
@pytest.mark.parametrize(
    ("p", "q", "r", "tiles"),
    [(132, 180, 1100, 40), (100, 30, 64 * 17, 2), (5, 3, 64 * 25 - 1, 3), (260, 130, 2100, 12)],
)
def test_blocks_share_tiles(layout: str, p: int, q: int, r: int, tiles: int, terms: int) -> None:
    torch.manual_seed(p + q + r)
    assert parts_of(Extents(q, p, r), 128, Target.cuda(replace(H200, sms=tiles))) > 1
    a, b, exact = operands(layout, p, q, r)
    y, again = (matmul(layout, 128, a, b, terms, p % 4 == 0, tiles) for _ in range(2))
    bound = 6e-4 if terms == 1 else 4e-7
    assert torch.equal(y, again) and float((y.double() - exact).norm() / exact.norm()) < bound
    if terms == 3:  # sums are split, and differ
        assert not torch.equal(y, matmul(layout, 128, a, b, terms, p % 4 == 0))


@pytest.mark.parametrize("terms", [1, 3])
def test_shared_tiles_of_batches_have_their_own_infinities(terms: int) -> None:
    a, b, exact = operands("kk", 70, 40, 1100, (3,))
    a[1, 5, 7] = math.inf
    y = matmul("kk", 176, a, b, terms, False, 12)
    assert bool(y[1, :, 5].isinf().all()) and int((~y.isfinite()).sum()) == 40
    whole = y.isfinite()
    error = (y.double() - exact)[whole].norm() / exact[whole].norm()
    assert float(error) < (6e-4 if terms == 1 else 4e-7)


def test_many_tiles_are_not_shared() -> None:
    a, b, _ = operands("kk", 300, 300, 1100)
    alone, room = (matmul("kk", 128, a, b, 3, True, tiles) for tiles in (0, 17))
    assert torch.equal(alone, room)  # nine tiles: two parts of each would not fit
