"""What a matrix product is expected to cost: ours by its tiles, PyTorch's library by its rates.

The heuristic asks it for a tile, rewriting asks it which products to take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusewright.ir.graph import ITEM_BYTES
from fusewright.ir.matmul import Extents

TILE_COLUMNS = 128  # kTileColumns of kernels/sm90/isa/sm90_fp16_split.cuh
TILE_DEPTH = 64
# Rows of a tile, and the microseconds of one block of 64 contracted indices (H200, 2026-11-15:
# 1024·8192·8192 in 0.628 ms with tiles of 128 rows, in 0.591 ms with 176).
BLOCK_US: Mapping[int, float] = {128: 1.25, 176: 1.54}
FINISH_US = 3.0  # of a tile: its first loads and its epilogue
# Few tiles are shared by several processors, each with some of the contracted blocks: no fewer than
# kLeastBlocks of kernels/sm90/matmul/sm90_split_k.cuh. Guesses until measured.
PART_BLOCKS = 8
JOIN_US = 6.0
SPLIT_US = 10.0  # of a call: the other kernel, which splits, and two launches
# The same in 16 bits, where nothing is split: from the tensor cores' rate, not measured yet.
HALF_BLOCK_US: Mapping[int, float] = {128: 0.36, 256: 0.66}
HALF_CALL_US = 5.0
# With TF32's precision: `a` rounded on its way to the tensor cores, or halves in memory, which it
# then has to be made (H200, 2026-11-16, sustained: 8192³ in 2.5 ms and, of float16, in 1.69).
# Of a block, on its way and by itself; tiles of 176 rows have 256 then.
ONCE_BLOCK_US: Mapping[int, float] = {128: 0.62, 176: 1.0}
ONCE_FLOPS_PER_US = 440e6
ROUNDED_FLOPS_PER_US = 650e6
ROUND_TILE_ROWS = 256
ROUND_BYTES_PER_US = 4e6
ROUND_BYTES: Mapping[bool, int] = {False: 6, True: 10}  # of a number; columns are read twice
ROUND_LAUNCH_US = 4.0
ROUND_REACH = 4  # how many times the example's rows a kernel for more of them is still built
SPLIT_BYTES = 8  # of a number of the other operand: read, and written as two halves
# float32 where PyTorch's library may round it to TF32: a type of its own for what it costs.
TF32 = "tf32"
# PyTorch's library, at its best (H200, 2026-11-16: TF32's is 344e6 at 2048³, 409e6 at 4096³).
LIBRARY_FLOPS_PER_US: Mapping[str, float] = {
    "float32": 51e6, TF32: 400e6, "float16": 650e6, "bfloat16": 650e6
}  # fmt: skip
LIBRARY_BYTES_PER_US = 3.5e6
LIBRARY_US = 5.0
# Ours is taken where it is expected to need at most this share of the library's time. Rounded or in
# 16 bits both are as fast; what is gained is the pass over memory that follows.
GAIN: Mapping[str, float] = {"float32": 0.85, TF32: 1.0, "float16": 1.1, "bfloat16": 1.1}


def multiplied_as(dtype: str, tf32: bool) -> str:
    """The type that says what a product costs: one of float32 may be rounded."""
    return TF32 if tf32 and dtype == "float32" else dtype


def tiles_for(dtype: str) -> Mapping[int, float]:
    """The rows that a tile can have, and the microseconds of one of its blocks."""
    return BLOCK_US if dtype == "float32" else HALF_BLOCK_US


def product_us(of: Extents, tile_rows: int, sms: int, dtype: str = "float32") -> float:
    """The time that a product of ours is expected to take."""
    if dtype == "float32":
        return _tiled_us(of, tile_rows, BLOCK_US[tile_rows], sms) + SPLIT_US
    tiles = _parts(of.columns, TILE_COLUMNS) * _parts(of.rows, tile_rows) * of.batches
    blocks = _parts(of.contracted, TILE_DEPTH)
    return _parts(tiles, sms) * (blocks * HALF_BLOCK_US[tile_rows] + FINISH_US) + HALF_CALL_US


def parts_of(of: Extents, tile_rows: int, sms: int) -> int:
    """How many processors share a tile, as `divide` in kernels/sm90/matmul/sm90_split_k.cuh has it."""
    tiles = _parts(of.columns, TILE_COLUMNS) * _parts(of.rows, tile_rows) * of.batches
    blocks = _parts(of.contracted, TILE_DEPTH)
    parts = min(sms // max(1, tiles), blocks // PART_BLOCKS)
    return _parts(blocks, _parts(blocks, parts)) if parts > 1 else 1


def _tiled_us(of: Extents, tile_rows: int, block_us: float, sms: int) -> float:
    """Of the tiles of a product in float32, which may be shared."""
    tiles = _parts(of.columns, TILE_COLUMNS) * _parts(of.rows, tile_rows) * of.batches
    blocks, parts = _parts(of.contracted, TILE_DEPTH), parts_of(of, tile_rows, sms)
    each = _parts(blocks, parts) * block_us + FINISH_US
    return _parts(tiles, sms) * each + (JOIN_US if parts > 1 else 0.0)


def best_tile_rows(of: Extents, sms: int, dtype: str = "float32") -> int:
    """The tile with which the last wave of blocks, and the edges, waste least."""
    return min(tiles_for(dtype), key=lambda each: product_us(of, each, sms, dtype))


def best_us(of: Extents, sms: int, dtype: str = "float32") -> float:
    if dtype == TF32:
        return _once_us(of, sms)
    return product_us(of, best_tile_rows(of, sms, dtype), sms, dtype)


def _once_us(of: Extents, sms: int) -> float:
    """With TF32's precision, in the tiles that are best for float32's: a kernel serves both."""
    a, b = (of.batches * rows * of.contracted for rows in (of.columns, of.rows))
    tile_rows = best_tile_rows(of, sms)
    first = rounded_from(of, tile_rows, False, False)
    if 0 < first <= of.rows:
        tiled = product_us(of, ROUND_TILE_ROWS, sms, "float16") - HALF_CALL_US
        before = a * ROUND_BYTES[False] / ROUND_BYTES_PER_US + ROUND_LAUNCH_US
    else:
        tile = 128 if tile_rows == 128 else ROUND_TILE_ROWS
        tiled, before = _tiled_us(of, tile, ONCE_BLOCK_US[tile_rows], sms), 0.0
    split = SPLIT_US + b * SPLIT_BYTES / LIBRARY_BYTES_PER_US
    return split + before + max(tiled, _moved_us(of, TF32))


def rounded_from(of: Extents, tile_rows: int, free_major: bool, shared: bool) -> int:
    """The least rows for which `a` had better be rounded before the product; 0: not in sight.

    `shared`: whether the rows of all batches count, as they have one `a`.
    """
    numbers = of.columns * of.contracted * (1 if shared else of.batches)
    rows = of.rows * (of.batches if shared else 1)
    if not numbers or not rows:
        return 0
    tile = tile_rows if tile_rows == TILE_COLUMNS else ROUND_TILE_ROWS
    once, halves = (_parts(of.rows, each) * each / of.rows for each in (tile, ROUND_TILE_ROWS))
    saved_us = 2 * (once / ONCE_FLOPS_PER_US - halves / ROUNDED_FLOPS_PER_US)  # a number and row
    launches = 2 if free_major else 1
    spent_us = ROUND_BYTES[free_major] / ROUND_BYTES_PER_US + launches * ROUND_LAUNCH_US / numbers
    if spent_us > ROUND_REACH * rows * saved_us:
        return 0
    return math.ceil(spent_us / saved_us)


def library_us(of: Extents, dtype: str = "float32") -> float:
    """The time that PyTorch's own product is expected to take."""
    flops = 2 * of.rows * of.columns * of.contracted * of.batches
    taken = max(flops / LIBRARY_FLOPS_PER_US[dtype], _moved_us(of, dtype))
    return taken + LIBRARY_US if dtype == TF32 else max(taken, LIBRARY_US)


def _moved_us(of: Extents, dtype: str) -> float:
    a, b, result = of.columns * of.contracted, of.rows * of.contracted, of.rows * of.columns
    item = ITEM_BYTES["float32" if dtype == TF32 else dtype]
    return item * (a + b + result) * of.batches / LIBRARY_BYTES_PER_US


def is_worthwhile(of: Extents, dtype: str, sms: int = 132) -> bool:
    """Whether a product of this size is ours rather than the library's."""
    return best_us(of, sms, dtype) <= GAIN[dtype] * library_us(of, dtype)


def _parts(size: int, part: int) -> int:
    return -(-size // part)
