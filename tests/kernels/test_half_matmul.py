"""The 16-bit matmul kernel, run without a GPU: g++, fibers and tests/support/sm90_on_host.hpp.

Operands are small whole numbers, so every sum is exact and every comparison is for equality. Memory
between rows, around matrices and shared memory before the kernel starts hold NaN.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.support.tensor_cores_on_host import library_of

UNVISITED = 12345.5
DTYPES = [torch.float16, torch.bfloat16]
LAYOUTS = ["kk", "kf", "fk", "ff"]  # of a and b: contracted or free index contiguous
BODY = r"""
namespace {
struct Added {
  const float* addend;
  float* out;
  int64_t columns, lanes;
  template <int V> struct Elem { float y[V]; };
  template <int V> void load(Elem<V>& elem, int64_t q, int64_t l) const {
    for (int v = 0; v < V; ++v) elem.y[v] = addend[q * columns + l + v];
  }
  template <int V> void give(Elem<V>& elem, int v, float x) const { elem.y[v] += x; }
  template <int V> void visit(const Elem<V>& elem, int64_t q, int64_t l, int) const {
    for (int v = 0; v < V; ++v) {
      float& place = out[q * columns + l + v];
      if (place != 12345.5f || V != lanes) std::abort();  // twice, or not in vectors
      place = elem.y[v];
    }
  }
};
struct Arguments {
  void *a, *b, *inverse_a, *inverse_b, *addend, *out;
  int64_t row_a, batch_a, row_b, batch_b, p, q, r, batches, vectors;
};
template <class T, bool kFreeMajorA, bool kFreeMajorB, int kTileRows>
int run(const Arguments& of) {
  memset(emulated_shared, 0xff, sizeof(emulated_shared));
  return fw::half_matmul<T, kFreeMajorA, kFreeMajorB, kTileRows>(
      Ends<Added>{{{{(float*)of.addend, (float*)of.out, of.p, of.vectors ? 4 : 1}}}},
      of.vectors,
      fw::HalfOperand<T>{(T*)of.a, of.row_a, of.batch_a, (float*)of.inverse_a},
      fw::HalfOperand<T>{(T*)of.b, of.row_b, of.batch_b, (float*)of.inverse_b},
      {of.p, of.q, of.r, of.batches}, 0, nullptr);
}
}  // namespace
extern "C" int takes_copies(void* data, int64_t row, int64_t batch, int64_t batches) {
  return fw::copyable(fw::HalfOperand<fw::half>{(fw::half*)data, row, batch}, batches);
}
"""
ENTRY = """extern "C" int {name}(const Arguments& of) {{
  return run<fw::{kind}, {a}, {b}, {tile}>(of);
}}"""


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in "a b inverse_a inverse_b addend out".split()),
        *((name, ctypes.c_int64) for name in "row_a batch_a row_b batch_b p q r".split()),
        *((name, ctypes.c_int64) for name in "batches vectors".split()),
    )


def entries() -> list[str]:
    free = {"k": "false", "f": "true"}
    return [
        ENTRY.format(name=f"{kind}_{x}{y}_{tile}", kind=kind, a=free[x], b=free[y], tile=tile)
        for kind in ("half", "bf16")
        for x, y in LAYOUTS
        for tile in (128, 256)
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel's own text, its instructions replaced by the stand-ins."""
    return library_of("sm90/matmul/sm90_half_gemm.cuh", BODY, *entries())


@dataclass(frozen=True)
class Operand:
    """Small integers, [free][contracted] or with batches before, as they are stored."""

    major: str  # "k" or "f"
    numbers: Tensor
    stored: Tensor
    inverse: Tensor | None = None

    @property
    def strides(self) -> tuple[int, int]:
        """Of a row and of a batch."""
        return self.stored.stride(-2), self.stored.stride(0) if self.stored.dim() == 3 else 0


def operand(
    major: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    pad: int | None = None,
    shift: int = 0,
    batch_pad: int = 0,
) -> Operand:
    """`shape` is (batches,) free, contracted. Stored with `pad` NaNs after each row, `shift` before
    the first and `batch_pad` after each batch; without a pad as the copy engine wants its rows."""
    numbers = torch.randint(-40, 41, shape).to(dtype)
    by_rows = numbers if major == "k" else numbers.mT
    rows, columns = by_rows.shape[-2:]
    pitch = columns + (-columns % 8 if pad is None else pad)
    strides = (rows * pitch + batch_pad, pitch, 1)[-len(shape) :]
    room = torch.full((shift + by_rows.shape[0] * strides[0],), math.nan)
    stored = room.to(dtype).as_strided(by_rows.shape, strides, shift)
    stored.copy_(by_rows)
    return Operand(major, numbers, stored)


def operands(
    layout: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    batches: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> tuple[Operand, Operand]:
    p, q, r = sizes
    torch.manual_seed(sum(sizes))
    a = operand(layout[0], dtype, (*batches[0], p, r))
    return a, operand(layout[1], dtype, (*batches[1], q, r))


def exact(a: Operand, b: Operand) -> Tensor:
    result = b.numbers.double() @ a.numbers.double().mT
    for inverse, at in ((a.inverse, -2), (b.inverse, -1)):
        result = result if inverse is None else result * inverse.unsqueeze(at)
    return result.float()


def matmul(tile: int, a: Operand, b: Operand, vectors: bool = False) -> Tensor:
    """result[…][q][p]; every element must be visited once, and be given its own addend."""
    shape = (b.numbers.double() @ a.numbers.double().mT).shape
    addend, out = torch.randint(-9, 10, shape).float(), torch.full(shape, UNVISITED)
    pointers = (a.stored, b.stored, a.inverse, b.inverse, addend, out)
    arguments = Arguments(
        *(None if each is None else each.data_ptr() for each in pointers),
        *(*a.strides, *b.strides, shape[-1], shape[-2], a.numbers.shape[-1]),
        *(math.prod(shape[:-2]), vectors),
    )
    kind = {torch.float16: "half", torch.bfloat16: "bf16"}[a.stored.dtype]
    entry = getattr(library(), f"{kind}_{a.major}{b.major}_{tile}")
    assert entry(ctypes.byref(arguments)) == 0
    assert not (out == UNVISITED).any()
    return out - addend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(132, 300, 132), (1, 1, 1), (129, 5, 67)])
def test_every_layout_and_edge(
    layout: str, tile: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    a, b = operands(layout, dtype, sizes)
    assert torch.equal(matmul(tile, a, b), exact(a, b))


@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize("sizes", [(130, 300, 450), (130, 1030, 8)])
def test_many_blocks_and_many_tiles(tile: int, sizes: tuple[int, int, int]) -> None:
    """More blocks than the ring has stages, in several tiles; more tiles than form a group."""
    a, b = operands("kf", torch.float16, sizes)
    assert torch.equal(matmul(tile, a, b), exact(a, b))


@pytest.mark.parametrize("layout", ["kk", "ff"])
@pytest.mark.parametrize("vectors", [False, True])
def test_the_epilogue_takes_vectors(layout: str, vectors: bool) -> None:
    a, b = operands(layout, torch.bfloat16, (68, 35, 20))
    assert torch.equal(matmul(128, a, b, vectors), exact(a, b))


@pytest.mark.parametrize("layout", ["kk", "fk", "ff"])
@pytest.mark.parametrize("batches", [((3,), (3,)), ((), (3,)), ((3,), ())])
def test_batches_have_their_own_matrices_or_share_one(
    layout: str, batches: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    a, b = operands(layout, torch.float16, (65, 130, 70), batches)
    assert torch.equal(matmul(128, a, b), exact(a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gathered", ["a", "b", "ab"])
@pytest.mark.parametrize(("pad", "shift"), [(1, 0), (None, 1), (2, 3)])
def test_any_alignment(layout: str, gathered: str, pad: int | None, shift: int) -> None:
    tile = 256 if pad is None else 128
    torch.manual_seed(shift)
    a, b = (
        operand(major, torch.bfloat16, (free, 133), *((pad, shift) if name in gathered else ()))
        for name, major, free in zip("ab", layout, (131, 261), strict=True)
    )
    assert torch.equal(matmul(tile, a, b), exact(a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_at_any_alignment(layout: str) -> None:
    a = operand(layout[0], torch.float16, (3, 40, 72), batch_pad=3)
    b = operand(layout[1], torch.float16, (3, 80, 72), batch_pad=4)
    assert torch.equal(matmul(128, a, b), exact(a, b))


@pytest.mark.parametrize(
    ("address", "row_stride", "batch_stride", "batches", "taken"),
    [
        (4096, 72, 0, 1, True),
        (4096, 72, 720, 5, True),
        (4096, 72, 0, 5, True),
        (4096, 72, 3, 1, True),
        (4096, 72, 724, 5, False),
        (4096, 72, -720, 5, False),
        (4096, 68, 0, 1, False),
        (4096, 0, 0, 1, False),
        (4104, 72, 0, 1, False),
    ],
)
def test_aligned_operands_go_through_the_copy_engine(
    address: int, row_stride: int, batch_stride: int, batches: int, taken: bool
) -> None:
    numbers = map(ctypes.c_int64, (row_stride, batch_stride, batches))
    assert library().takes_copies(ctypes.c_void_p(address), *numbers) == taken


@pytest.mark.parametrize("which", ["a", "b", "ab"])
@pytest.mark.parametrize("batches", [((), ()), ((3,), (3,)), ((), (3,)), ((3,), ())])
def test_factors_of_rows_and_columns(
    which: str, batches: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    a, b = (
        replace(each, inverse=torch.randint(1, 6, each.numbers.shape[:-1]).float())
        if name in which
        else each
        for name, each in zip("ab", operands("fk", torch.half, (140, 133, 9), batches), strict=True)
    )
    assert torch.equal(matmul(128, a, b), exact(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["kk", "ff"])
def test_infinity_and_nan_are_where_they_belong(layout: str, dtype: torch.dtype) -> None:
    a, b = operands(layout, dtype, (132, 70, 67))
    for each, at, number in ((a, 3, math.inf), (b, 7, -math.inf), (a, 100, math.nan)):
        each.numbers[at, 5] = number
        (each.stored if each.major == "k" else each.stored.mT)[at, 5] = number
    y, expected = matmul(128, a, b), exact(a, b)
    assert int(expected.isinf().sum()) > 100 and 70 <= int(expected.isnan().sum()) < 200
    assert torch.equal(y.nan_to_num(nan=0.25), expected.nan_to_num(nan=0.25))


@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize("layout", ["kk", "ff"])
def test_an_empty_sum_is_zero(layout: str, tile: int) -> None:
    a, b = operands(layout, torch.half, (130, 70, 0))
    assert torch.equal(matmul(tile, a, b), torch.zeros(70, 130))


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4)])
def test_an_empty_result_is_not_written(sizes: tuple[int, int, int]) -> None:
    a, b = operands("kk", torch.half, sizes)
    assert matmul(128, a, b).numel() == 0
