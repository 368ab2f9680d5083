"""What a matrix product is expected to cost: ours by its tiles, PyTorch's library by its rates.

The heuristic asks it for a tile, rewriting asks it which products to take, and a program with
products asks it for the smallest batch with which it is still the better one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusewright.product import Extents, ProductKernel

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


def product_us(of: Extents, tile_rows: int, sms: int) -> float:
    """The time that a product of ours is expected to take."""
    tiles = _parts(of.columns, TILE_COLUMNS) * _parts(of.rows, tile_rows) * of.batches
    blocks = _parts(of.contracted, TILE_DEPTH)
    return _parts(tiles, sms) * (blocks * BLOCK_US[tile_rows] + FINISH_US) + SPLIT_US


def best_tile_rows(of: Extents, sms: int) -> int:
    """The tile with which the last wave of blocks, and the edges, waste least."""
    return min(BLOCK_US, key=lambda each: product_us(of, each, sms))


def best_us(of: Extents, sms: int) -> float:
    return product_us(of, best_tile_rows(of, sms), sms)


def library_us(of: Extents) -> float:
    """The time that PyTorch's own product is expected to take."""
    a, b, result = of.columns * of.contracted, of.rows * of.contracted, of.rows * of.columns
    flops = 2 * of.rows * of.columns * of.contracted * of.batches
    moved = 4 * (a + b + result) * of.batches / LIBRARY_BYTES_PER_US
    return max(flops / LIBRARY_FLOPS_PER_US, moved, LIBRARY_US)


def is_worthwhile(of: Extents, sms: int = 132) -> bool:
    """Whether a product of this size is ours rather than the library's."""
    return best_us(of, sms) <= GAIN * library_us(of)


def _parts(size: int, part: int) -> int:
    return -(-size // part)


def least_size(
    kernels: Iterable[ProductKernel], symbol: str, sizes: Mapping[str, int], sms: int
) -> int:
    """The smallest size of `symbol` from which on these products together are ours.

    At the example's own size they are, by choice.
    """
    held = list(kernels)

    def pays(size: int) -> bool:
        extents = [each.extents({**sizes, symbol: size}) for each in held]
        return sum(best_us(of, sms) for of in extents) <= sum(map(library_us, extents))

    low, high = 1, sizes[symbol]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle + 1, high)
    return high
