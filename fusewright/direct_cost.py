"""Thin convolutions as plain sums (kernels/direct_convolution.cuh): which have room, and how long
they take.

With few channels, or many groups, tensor cores would mostly multiply zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusewright.window import Geometry, WindowAxis

THREADS = 128  # kDirectThreads
ACROSS, ROWS, OUTS = (32, 16, 8), (8, 4, 2, 1), (8, 4, 2, 1)
MOST_TAPS = 49
THIN = 16  # channels or results that a step of the tensor cores has
SHARED_BYTES = 112 * 1024  # kDirectBytes
# What a tap costs a thread beside its first row, where one result shares it; what short rows do.
TAP_SHARE = 0.5
SHORT_ROW = 4
# Cycles of a processor: for a tile, a number that is read, a result and one of its terms (H200,
# 2026-11-16, four convolutions).
TILE_CYCLES, READ_CYCLES, RESULT_CYCLES, TERM_CYCLES = 700.0, 0.45, 0.2, 0.015
CYCLES_PER_US = 1700.0
ALONE = 3  # times as long takes a tile that has a processor to itself
BYTES_PER_US = 2.8e6
CALL_US = 5.0


@dataclass(frozen=True)
class DirectSchedule:
    """How a thin convolution is summed: a thread has `outs` results of `rows` positions, and
    `across` threads lie in a row.

    With `line_positions` only where it is to be exact in fp32; otherwise tensor cores multiply
    halves, as in a WindowSchedule.
    """

    outs: int
    rows: int
    across: int
    line_positions: int = 0

    @property
    def height(self) -> int:
        return THREADS // self.across * self.rows


def best_tile(of: Geometry) -> DirectSchedule:
    """Tiles that waste little, and threads that share much of what they read."""
    outs = next((each for each in OUTS if each <= of.results), 1)
    outs = outs if outs == of.results or outs == OUTS[0] else 2 * outs
    tiles = [DirectSchedule(outs, rows, across) for across in ACROSS for rows in ROWS]

    def cost(tile: DirectSchedule) -> tuple[bool, float]:
        again = of.results > outs and _bytes(of, tile, _layers(of)) > SHARED_BYTES
        padded = _padded(of.y.result, tile.height) * _padded(of.x.result, tile.across)
        taps = 1 + TAP_SHARE * (of.y.taps - 1) / (tile.rows * outs**0.5)
        return again, padded * taps * (1 + SHORT_ROW / tile.across)

    return min(tiles, key=cost)


def _layers(of: Geometry) -> int:
    """Channels, and the taps of each along z."""
    return of.channels * of.z.taps


def _bytes(of: Geometry, tile: DirectSchedule, layers: int) -> int:
    """Shared memory for two patches of so many layers, and the weights of one group or two."""
    weights = _padded(of.channels * of.taps * _padded(of.results, tile.outs), 4)
    return 4 * (2 * layers * _patch(of, tile) + weights * (2 if of.groups > 1 else 1))


def _patch(of: Geometry, tile: DirectSchedule) -> int:
    """What a tile reads of a layer."""
    return _reach(of.y, tile.height) * _reach(of.x, tile.across)


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def fits(of: Geometry, tile: DirectSchedule | None = None) -> bool:
    """Whether it is thin, and the weights of a group and what a tile reads of one layer find
    room; the best tile, or this one."""
    if (of.transposed and of.strided) or of.y.taps * of.x.taps > MOST_TAPS:
        return False
    thin = min(of.channels, of.results) < THIN
    return thin and _bytes(of, tile or best_tile(of), 1) <= SHARED_BYTES


def _reach(axis: WindowAxis, positions: int) -> int:
    return (positions - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1


def direct_us(of: Geometry, sizes: Mapping[str, int], sms: int) -> float | None:
    """The time that it is expected to take; None where it has no room."""
    if not fits(of):
        return None
    tile = best_tile(of)
    tiles = -(-of.y.result // tile.height) * -(-of.x.result // tile.across)
    tiles *= of.images.at(sizes) * of.z.result * of.groups
    again = _bytes(of, tile, _layers(of)) > SHARED_BYTES
    reads = _layers(of) * _patch(of, tile) * (-(-of.results // tile.outs) if again else 1)
    results = tile.height * tile.across * _padded(of.results, tile.outs)
    terms = RESULT_CYCLES + TERM_CYCLES * of.channels * of.taps
    cycles = TILE_CYCLES + READ_CYCLES * reads + terms * results
    computed = max(-(-tiles // sms), ALONE) * cycles / CYCLES_PER_US
    moved = 4 * (of.source_elements(sizes) + of.result_elements(sizes)) / BYTES_PER_US
    return max(computed, moved) + CALL_US
