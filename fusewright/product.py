"""The description of one matrix product: result[q][p] = Σ_r b[q, r] · a[p, r], and what follows it.

`a` is read as it is, in float32; `b` comes split into two float16 halves and a scale for each of
its stored rows. The epilogue is a pointwise loop over the result in which one load, `product`, is
not read from memory: the kernel gives it. So a product ends in any pointwise arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusewright.ir import Dim
from fusewright.loop import Argument, Load, LoopKernel


@dataclass(frozen=True)
class RawOperand:
    """A float32 matrix in memory; strides in elements, along p and along r."""

    buffer: str
    free_stride: Dim
    contracted_stride: Dim


@dataclass(frozen=True)
class SplitOperand:
    """b = (hi + lo) · inverse, one `inverse` for each stored row; rows lie `row_stride` apart.

    Stored rows are b's q, or its r where `contracted_rows` holds. TMA wants `row_stride` to be a
    multiple of 8; what lies between two rows is never read.
    """

    hi: str
    lo: str
    inverse: str
    row_stride: Dim
    contracted_rows: bool


@dataclass(frozen=True)
class ProductKernel:
    """The last outer axis of `epilogue` are the columns, its other axes the rows, flattened."""

    name: str
    summary: str
    rows: Dim
    columns: Dim
    contracted: Dim
    raw: RawOperand
    split: SplitOperand
    epilogue: LoopKernel
    product: str

    @property
    def given(self) -> Load:
        """The load that the kernel answers from its registers."""
        return next(
            item
            for item in self.epilogue.body
            if isinstance(item, Load) and item.name == self.product
        )

    @property
    def operands(self) -> tuple[Argument, ...]:
        return (
            Argument(self.raw.buffer, "float32", False),
            Argument(self.split.hi, "float16", False),
            Argument(self.split.lo, "float16", False),
            Argument(self.split.inverse, "float32", False),
        )

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The operands, then what else the epilogue reads, then what it writes."""
        known = {self.given.access.buffer, *(each.name for each in self.operands)}
        rest = [
            each for each in self.epilogue.arguments if each.is_output or each.name not in known
        ]
        return (*self.operands, *rest)

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.epilogue.symbols

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Rows, columns and contracted indices at these sizes."""
        return self.rows.at(sizes), self.columns.at(sizes), self.contracted.at(sizes)
