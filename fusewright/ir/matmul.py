"""The description of one matrix product: result[q][p] = Σ_r b[q, r] · a[p, r], and what follows it.

Several products of one size may lie side by side, as batches. `a` is read as it is. In float32 `b`
comes split into two float16 halves and a scale for each of its stored rows; in 16 bits it is read
as it is, too. With TF32's precision `a` may be rounded to halves first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusewright.ir.epilogue import Ending
from fusewright.ir.graph import ONE, ZERO, Dim
from fusewright.ir.loop import Argument, LoopKernel

ROUND_PARTS = 16  # kMostRoundParts of kernels/sm90/matmul/sm90_round_operand.cuh


class Extents(NamedTuple):
    """The sizes of a product, as numbers."""

    rows: int
    columns: int
    contracted: int
    batches: int = 1


@dataclass(frozen=True)
class RawOperand:
    """A matrix in memory for each batch; strides in elements, along p or q, r and the batches.

    One of the first two is 1. A batch stride of 0: all batches share the matrix.
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
        """Whether what is contiguous is not the contracted index."""
        return self.contracted_stride != ONE

    @property
    def row_stride(self) -> Dim:
        return self.contracted_stride if self.free_major else self.free_stride


@dataclass(frozen=True)
class SplitOperand:
    """b = (hi + lo) · inverse, one `inverse` for each stored row; rows lie `row_stride` apart.

    Stored rows are b's q, or its r where `contracted_rows` holds; batch follows batch. TMA wants
    `row_stride` to be a multiple of 8; what lies between two rows is never read.
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
class ProductKernel(Ending):
    """The last axis of a pointwise `epilogue` are the columns, its others batches and rows.

    One that reduces has the columns alone as its outer axis, or as its inner one.
    """

    name: str
    summary: str
    rows: Dim
    columns: Dim
    contracted: Dim
    batches: Dim
    a: RawOperand
    b: SplitOperand | RawOperand
    epilogue: LoopKernel
    product: str

    @property
    def column_axes(self) -> tuple[int, ...]:
        return (len(self.epilogue.axes) - 1,)

    @property
    def all_rows(self) -> Dim:
        return self.batches * self.rows

    @property
    def shares_rounding(self) -> bool:
        """Whether all batches would share one `a` as halves: none has factors of its own in it."""
        folds = isinstance(self.b, SplitOperand) and self.b.contracted_rows
        return self.a.batch_stride == ZERO and not folds

    @property
    def rounded_rows(self) -> Dim:
        """The rows that one `a` as halves is good for."""
        return self.all_rows if self.shares_rounding else self.rows

    @property
    def rounded_bytes(self) -> tuple[Dim, ...]:
        """Room for `a` as halves, its rows padded, and a scale for each column, whose parts are
        measured apart where it is not one row; as `rounding` in kernels/sm90/matmul/sm90_round_operand.cuh has it."""
        layers = ONE if self.shares_rounding else self.batches
        free_major = self.a.free_stride == ONE
        lines = self.contracted if free_major else self.columns
        numbers = (layers * self.columns * self.contracted * 2, layers * lines * 16)
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

    def renamed(self, buffers: Mapping[str, str]) -> ProductKernel:
        """The same with operands of other names."""
        return replace(self, a=self.a.renamed(buffers), b=self.b.renamed(buffers))

    def extents(self, sizes: Mapping[str, int]) -> Extents:
        wanted = (self.rows, self.columns, self.contracted, self.batches)
        return Extents(*(each.at(sizes) for each in wanted))
