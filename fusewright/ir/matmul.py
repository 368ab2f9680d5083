"""The description of one matmul: result[q][p] = Σ_r b[q, r] · a[p, r], and its epilogue.

Several matmuls of one size may be a batch. `a` is read as it is. In float32, `b` is split into high
and low float16 parts and a scale for each stored row; in 16-bit types it is read as it is, too.
With TF32's precision, `a` may be rounded to float16 first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fusewright.ir.epilogue import WithEpilogue
from fusewright.ir.graph import ITEM_BYTES, ONE, ZERO, Dim
from fusewright.ir.loop import Argument

ROUND_PARTS = 16  # kMostRoundParts of kernels/sm90/matmul/sm90_round_operand.cuh


class Extents(NamedTuple):
    """The sizes of a matmul, as numbers."""

    rows: int
    columns: int
    contracted: int
    batches: int = 1


@dataclass(frozen=True)
class RawOperand:
    """A matrix in memory for each batch; strides in elements, along p or q, r and the batches.

    One of the first two is 1. With a batch stride of 0, all batches share the matrix.
    """

    buffer: str
    dtype: str
    free_stride: Dim
    contracted_stride: Dim
    batch_stride: Dim

    def renamed(self, buffers: Mapping[str, str]) -> RawOperand:
        return replace(self, buffer=buffers[self.buffer])

    @property
    def free_major(self) -> bool:
        """Whether another index than the contracted one is contiguous."""
        return self.contracted_stride != ONE

    @property
    def row_stride(self) -> Dim:
        return self.contracted_stride if self.free_major else self.free_stride


@dataclass(frozen=True)
class SplitOperand:
    """b = (hi + lo) · inverse, one `inverse` for each stored row; rows are `row_stride` apart.

    Stored rows are b's q, or its r if `contracted_rows`; batches follow each other. TMA needs a
    `row_stride` that is a multiple of 8; the elements between two rows are never read.
    """

    hi: str
    lo: str
    inverse: str
    row_stride: Dim
    contracted_rows: bool

    def renamed(self, buffers: Mapping[str, str]) -> SplitOperand:
        hi, lo, inverse = (buffers[each] for each in (self.hi, self.lo, self.inverse))
        return replace(self, hi=hi, lo=lo, inverse=inverse)


@dataclass(frozen=True)
class MatmulKernel(WithEpilogue):
    """The last axis of a pointwise `epilogue` is the columns, the others are batches and rows.

    An epilogue that reduces has the columns alone as its outer axis, or as its inner one.
    """

    rows: Dim
    columns: Dim
    contracted: Dim
    batches: Dim
    a: RawOperand
    b: SplitOperand | RawOperand
    kind: ClassVar[str] = "matmul"

    @property
    def operator(self) -> str:
        return "mm" if self.batches == ONE else "bmm"

    @property
    def column_axes(self) -> tuple[int, ...]:
        return (len(self.epilogue.axes) - 1,)

    @property
    def all_rows(self) -> Dim:
        return self.batches * self.rows

    @property
    def shares_rounding(self) -> bool:
        """Whether all batches can share one rounded `a`: none multiplies its own factors into
        it."""
        folds = isinstance(self.b, SplitOperand) and self.b.contracted_rows
        return self.a.batch_stride == ZERO and not folds

    @property
    def rounded_rows(self) -> Dim:
        """The number of rows that use one rounded `a`."""
        return self.all_rows if self.shares_rounding else self.rows

    @property
    def rounded_bytes(self) -> tuple[Dim, ...]:
        """Workspace for the rounded `a` with padded rows, and for a scale per column, whose parts
        are measured separately unless a column is one row; as in `rounding` of
        sm90_round_operand.cuh."""
        layers = ONE if self.shares_rounding else self.batches
        free_major = self.a.free_stride == ONE
        rows = self.contracted if free_major else self.columns
        elements = layers * self.columns * self.contracted
        numbers = (elements * 2, layers * rows * 16)
        return (*numbers, layers * self.columns * (4 * (1 + ROUND_PARTS * free_major)))

    @property
    def operands(self) -> tuple[Argument, ...]:
        a = Argument(self.a.buffer, self.a.dtype, False)
        if isinstance(self.b, RawOperand):
            return (a, Argument(self.b.buffer, self.b.dtype, False))
        return (
            a,
            Argument(self.b.hi, "float16", False),
            Argument(self.b.lo, "float16", False),
            Argument(self.b.inverse, "float32", False),
        )

    def renamed(self, buffers: Mapping[str, str]) -> MatmulKernel:
        """The same kernel with other operand names."""
        return replace(self, a=self.a.renamed(buffers), b=self.b.renamed(buffers))

    def operand_bytes(self, sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
        rows, columns, contracted, batches = self.extents(sizes)
        a, b = (batches * size * contracted for size in (columns, rows))
        a = a if self.a.batch_stride != ZERO else columns * contracted
        item = ITEM_BYTES[self.a.dtype]  # hi and lo together have the same size
        scales = 0
        if isinstance(self.b, SplitOperand):
            scales = 4 * batches * (contracted if self.b.contracted_rows else rows)
        return item * (a + b) + scales

    def own_operations(self, sizes: Mapping[str, int]) -> int:
        return 2 * math.prod(self.extents(sizes))

    def extents(self, sizes: Mapping[str, int]) -> Extents:
        wanted = (self.rows, self.columns, self.contracted, self.batches)
        return Extents(*(each.at(sizes) for each in wanted))
