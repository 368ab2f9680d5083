"""The expected time of a matmul: ours by its tiles, PyTorch's by its rates.

The heuristic chooses a tile with it; rewriting chooses which matmuls are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusewright.ir.graph import ITEM_BYTES
from fusewright.ir.matmul import Extents
from fusewright.target.target import Target

TILE_COLUMNS, TILE_DEPTH = 128, 64  # kTileColumns, kTileDepth
# Rows of a tile, and the microseconds of one block of 64 contracted indices (H200, 2026-11-15:
# 1024·8192·8192 in 0.628 ms with tiles of 128 rows, in 0.591 ms with 176).
BLOCK_US: Mapping[int, float] = {128: 1.25, 176: 1.54}
FINISH_US = 3.0  # of a tile: its first loads and its epilogue
# If there are few tiles, several SMs share one. Each has at least kLeastBlocks contracted blocks.
# These are guesses until measured.
PART_BLOCKS = 8
JOIN_US = 6.0
SPLIT_US = 10.0  # the kernel that splits, and two launches
# The same in 16 bits, without splitting: from the tensor cores' rate, not measured yet.
HALF_BLOCK_US: Mapping[int, float] = {128: 0.36, 256: 0.66}
HALF_CALL_US = 5.0
# With TF32's precision: `a` is rounded on its way to the tensor cores (ONCE), or first written as
# fp16 (ROUNDED; H200, 2026-11-16, sustained: 8192³ in 2.5 ms and, with float16, in 1.69 ms). Tiles
# of 176 rows then have 256.
ONCE_BLOCK_US: Mapping[int, float] = {128: 0.62, 176: 1.0}
ONCE_FLOPS_PER_US = 440e6
ROUNDED_FLOPS_PER_US = 650e6
ROUND_TILE_ROWS = 256
ROUND_BYTES_PER_US = 4e6
ROUND_BYTES: Mapping[bool, int] = {False: 6, True: 10}  # per element; columns are read twice
ROUND_LAUNCH_US = 4.0
ROUND_REACH = 4  # A kernel is built for up to this many times the example's rows.
SPLIT_BYTES = 8  # per element of `b`: read, and written as high and low part
# float32 that PyTorch may round to TF32: for costs it is a type of its own.
TF32 = "tf32"
# PyTorch at its best (H200, 2026-11-16: TF32's is 344e6 at 2048³, 409e6 at 4096³).
PYTORCH_FLOPS_PER_US: Mapping[str, float] = {
    "float32": 51e6, TF32: 400e6, "float16": 650e6, "bfloat16": 650e6
}  # fmt: skip
PYTORCH_BYTES_PER_US = 3.5e6
PYTORCH_US = 5.0
# Ours is taken if it is expected to need at most this share of PyTorch's time. Rounded or in 16
# bits both are equally fast, but ours saves the following pass over memory.
GAIN: Mapping[str, float] = {"float32": 0.85, TF32: 1.0, "float16": 1.1, "bfloat16": 1.1}


def multiplied_as(dtype: str, target: Target) -> str:
    """The type that determines the cost: float32, too, may be rounded."""
    return TF32 if target.tf32 and dtype == "float32" else dtype


def tiles_for(dtype: str) -> Mapping[int, float]:
    """The possible rows of a tile, and the microseconds of one block of each."""
    return BLOCK_US if dtype == "float32" else HALF_BLOCK_US


def matmul_us(of: Extents, tile_rows: int, target: Target, dtype: str = "float32") -> float:
    """The expected time of our matmul."""
    if dtype == "float32":
        return _tiled_us(of, tile_rows, BLOCK_US[tile_rows], target) + SPLIT_US
    each = _parts(of.contracted, TILE_DEPTH) * HALF_BLOCK_US[tile_rows] + FINISH_US
    return _parts(_tiles(of, tile_rows), target.sms) * each + HALF_CALL_US


def _tiles(of: Extents, tile_rows: int) -> int:
    return _parts(of.columns, TILE_COLUMNS) * _parts(of.rows, tile_rows) * of.batches


def parts_of(of: Extents, tile_rows: int, target: Target) -> int:
    """How many SMs share a tile, as in `divide` of sm90_split_k.cuh."""
    blocks = _parts(of.contracted, TILE_DEPTH)
    parts = min(target.sms // max(1, _tiles(of, tile_rows)), blocks // PART_BLOCKS)
    return _parts(blocks, _parts(blocks, parts)) if parts > 1 else 1


def _tiled_us(of: Extents, tile_rows: int, block_us: float, target: Target) -> float:
    """The time of the tiles of a float32 matmul. SMs may share them."""
    blocks, parts = _parts(of.contracted, TILE_DEPTH), parts_of(of, tile_rows, target)
    each = _parts(blocks, parts) * block_us + FINISH_US
    return _parts(_tiles(of, tile_rows), target.sms) * each + (JOIN_US if parts > 1 else 0.0)


def best_tile_rows(of: Extents, target: Target, dtype: str = "float32") -> int:
    """The tile with the least waste in the last wave of blocks and at the edges."""
    return min(tiles_for(dtype), key=lambda each: matmul_us(of, each, target, dtype))


def best_us(of: Extents, target: Target, dtype: str = "float32") -> float:
    if dtype == TF32:
        return _once_us(of, target)
    return matmul_us(of, best_tile_rows(of, target, dtype), target, dtype)


def _once_us(of: Extents, target: Target) -> float:
    """The time with TF32's precision, in the best tile for float32, because one kernel has both."""
    a, b = (of.batches * rows * of.contracted for rows in (of.columns, of.rows))
    tile_rows, memory = best_tile_rows(of, target), target.facts.relative_memory
    first = rounded_from(of, tile_rows, False, False, target)
    if 0 < first <= of.rows:
        tiled = matmul_us(of, ROUND_TILE_ROWS, target, "float16") - HALF_CALL_US
        before = a * ROUND_BYTES[False] / (ROUND_BYTES_PER_US * memory) + ROUND_LAUNCH_US
    else:
        tile = 128 if tile_rows == 128 else ROUND_TILE_ROWS
        tiled, before = _tiled_us(of, tile, ONCE_BLOCK_US[tile_rows], target), 0.0
    split = SPLIT_US + b * SPLIT_BYTES / (PYTORCH_BYTES_PER_US * memory)
    return split + before + max(tiled, _moved_us(of, target, TF32))


def rounded_from(
    of: Extents, tile_rows: int, free_major: bool, shared: bool, target: Target
) -> int:
    """The least rows at which it is faster to round `a` before the matmul; 0 if they are too many.

    `shared`: whether all batches have the same `a`, so that the rows of all batches count.
    """
    elements = of.columns * of.contracted * (1 if shared else of.batches)
    rows = of.rows * (of.batches if shared else 1)
    if not elements or not rows:
        return 0
    tile = tile_rows if tile_rows == TILE_COLUMNS else ROUND_TILE_ROWS
    once, rounded = (_parts(of.rows, each) * each / of.rows for each in (tile, ROUND_TILE_ROWS))
    # per element and row
    saved_us = 2 * (once / ONCE_FLOPS_PER_US - rounded / ROUNDED_FLOPS_PER_US)
    saved_us /= target.facts.relative_compute
    launches = 2 if free_major else 1
    rate = ROUND_BYTES_PER_US * target.facts.relative_memory
    spent_us = ROUND_BYTES[free_major] / rate + launches * ROUND_LAUNCH_US / elements
    if spent_us > ROUND_REACH * rows * saved_us:
        return 0
    return math.ceil(spent_us / saved_us)


def pytorch_us(of: Extents, target: Target, dtype: str = "float32") -> float:
    """The expected time of PyTorch's matmul."""
    flops = 2 * of.rows * of.columns * of.contracted * of.batches
    rate = PYTORCH_FLOPS_PER_US[dtype] * target.facts.relative_compute
    taken = max(flops / rate, _moved_us(of, target, dtype))
    return taken + PYTORCH_US if dtype == TF32 else max(taken, PYTORCH_US)


def _moved_us(of: Extents, target: Target, dtype: str) -> float:
    a, b, result = of.columns * of.contracted, of.rows * of.contracted, of.rows * of.columns
    item = ITEM_BYTES["float32" if dtype == TF32 else dtype]
    rate = PYTORCH_BYTES_PER_US * target.facts.relative_memory
    return item * (a + b + result) * of.batches / rate


def is_worthwhile(of: Extents, dtype: str, target: Target) -> bool:
    """Whether our matmul of this size is faster than PyTorch's."""
    return best_us(of, target, dtype) <= GAIN[dtype] * pytorch_us(of, target, dtype)


def _parts(size: int, part: int) -> int:
    return -(-size // part)
