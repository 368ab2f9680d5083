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


# What a tile costs -----------------------------------------------------------------------------

TILE_COLUMNS = 128  # kTileColumns of kernels/sm90_split.cuh
TILE_DEPTH = 64
# Rows of a tile, and the microseconds of one block of 64 contracted indices (H200, 2026-11-15:
# 1024·8192·8192 in 0.628 ms with tiles of 128 rows, in 0.591 ms with 176).
BLOCK_US: Mapping[int, float] = {128: 1.25, 176: 1.54}
FINISH_US = 3.0  # of a tile: its first loads and its epilogue
SPLIT_US = 10.0  # of a call: the other kernel, which splits, and two launches
# PyTorch's library, at its best.
LIBRARY_FLOPS_PER_US = 51e6
LIBRARY_BYTES_PER_US = 3.5e6
LIBRARY_US = 5.0
# Ours is taken where it is expected to need at most this share of the library's time.
GAIN = 0.85


def product_us(rows: int, columns: int, contracted: int, tile_rows: int, sms: int) -> float:
    """The time that a product of ours is expected to take."""
    tiles = _parts(columns, TILE_COLUMNS) * _parts(rows, tile_rows)
    blocks = _parts(contracted, TILE_DEPTH)
    return _parts(tiles, sms) * (blocks * BLOCK_US[tile_rows] + FINISH_US) + SPLIT_US


def best_tile_rows(rows: int, columns: int, contracted: int, sms: int) -> int:
    """The tile with which the last wave of blocks, and the edges, waste least."""
    return min(BLOCK_US, key=lambda each: product_us(rows, columns, contracted, each, sms))


def library_us(rows: int, columns: int, contracted: int) -> float:
    """The time that PyTorch's own product is expected to take."""
    numbers = rows * contracted + columns * contracted + rows * columns
    flops = 2 * rows * columns * contracted
    moved = 4 * numbers / LIBRARY_BYTES_PER_US
    return max(flops / LIBRARY_FLOPS_PER_US, moved, LIBRARY_US)


def is_worthwhile(rows: int, columns: int, contracted: int, sms: int = 132) -> bool:
    """Whether a product of this size is ours rather than the library's."""
    tile_rows = best_tile_rows(rows, columns, contracted, sms)
    ours = product_us(rows, columns, contracted, tile_rows, sms)
    return ours <= GAIN * library_us(rows, columns, contracted)


def _parts(size: int, part: int) -> int:
    return -(-size // part)
