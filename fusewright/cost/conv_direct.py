"""Thin convolutions as plain sums (kernels/convolution/direct_convolution.cuh, depthwise_convolution.cuh): which
have room, and how long they take.

With few channels, or many groups, tensor cores would mostly multiply zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusewright.ir.convolution import Geometry, WindowAxis

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
BLOCKS = 4  # tiles that a processor has at once
# Of planes: threads that each processor should have, at the least; bytes that move. Of gradients by
# the weights: thread blocks of a processor, positions that each should have at the least.
PLANE_THREADS = 1024
PLANE_BLOCKS, PLANE_POSITIONS = 8, 2048
STRIPS = range(14, 3, -1)  # rows of a thread, of gradients by the weights
MOST_PARTS = 2**16 - 1
MOST_GATHERED = 16  # positions of a stride, which a thread has
PLANE_BYTES_PER_US = 2.5e6


@dataclass(frozen=True)
class DirectSchedule:
    """How a thin convolution is summed: a thread has `outs` results of `rows` positions, and
    `across` threads lie in a row; 0 where a group has a single channel: rows then lie in planes,
    without tiles.

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


def best_tile(of: Geometry, sizes: Mapping[str, int], sms: int) -> DirectSchedule:
    """Tiles that waste little, threads that share much of what they read, and work for all."""
    if is_plane(of):
        planes = of.images.at(sizes) * of.groups * of.results * of.x.result
        few = [rows for rows in ROWS if planes * -(-of.y.result // rows) >= sms * PLANE_THREADS]
        return DirectSchedule(1, next((rows for rows in few if rows < 2 * of.y.result), 1), 0)

    def cost(tile: DirectSchedule) -> tuple[bool, float]:
        again = of.results > tile.outs and _bytes(of, tile, _layers(of)) > SHARED_BYTES
        padded = _padded(of.y.result, tile.height) * _padded(of.x.result, tile.across)
        taps = 1 + TAP_SHARE * (of.y.taps - 1) / (tile.rows * tile.outs**0.5)
        idle = max(1.0, sms * BLOCKS / _tiles(of, tile, sizes))
        return again, padded * taps * (1 + SHORT_ROW / tile.across) * idle

    return min(_with_room(of, _candidates(of)), key=cost)


def _candidates(of: Geometry) -> list[DirectSchedule]:
    outs = next((each for each in OUTS if each <= of.results), 1)
    outs = outs if outs == of.results or outs == OUTS[0] else 2 * outs
    return [DirectSchedule(outs, rows, across) for across in ACROSS for rows in ROWS]


def _with_room(of: Geometry, tiles: Iterable[DirectSchedule]) -> list[DirectSchedule]:
    """Those of which one layer and the weights find room."""
    return [each for each in tiles if each.across and _bytes(of, each, 1) <= SHARED_BYTES]


def is_plane(of: Geometry) -> bool:
    """Whether a group has a single channel, and nothing moves along z."""
    return of.channels == 1 and of.z.is_single


def has_plane_gradient(of: Geometry) -> bool:
    """Whether the gradient by the weights is summed plane by plane; it keeps all taps' sums."""
    return is_plane(of) and not of.transposed and of.taps <= MOST_TAPS


def plane_gradient_rows(of: Geometry) -> int:
    """Rows of a thread's strip: many share what they read, and few should be left over."""
    fitting = [rows for rows in STRIPS if rows <= of.y.result]
    return max(fitting, key=lambda rows: -(of.y.result % rows), default=max(of.y.result, 1))


def plane_gradient_parts(of: Geometry, sizes: Mapping[str, int], sms: int) -> int:
    """In how many parts of the strips: work for all processors, and not too little for each."""
    strips = of.images.at(sizes) * max(1, of.y.result // plane_gradient_rows(of))
    positions = of.images.at(sizes) * of.y.result * of.x.result
    wanted = -(-sms * PLANE_BLOCKS // (of.groups * of.results))
    parts = max(1, min(wanted, positions // PLANE_POSITIONS, strips, MOST_PARTS))
    return -(-strips // -(-strips // parts)) if strips else 1  # none has nothing to do


def _tiles(of: Geometry, tile: DirectSchedule, sizes: Mapping[str, int]) -> int:
    """Of all images and groups."""
    tiles = -(-of.y.result // tile.height) * -(-of.x.result // tile.across)
    return tiles * of.images.at(sizes) * of.z.result * of.groups


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
    room; any tile, or this one."""
    if of.y.taps * of.x.taps > MOST_TAPS or min(of.channels, of.results) >= THIN:
        return False
    if is_plane(of) and (tile is None or not tile.across):
        return not of.transposed or of.y.stride * of.x.stride <= MOST_GATHERED
    if of.transposed and of.strided:
        return False
    return bool(_with_room(of, (tile,) if tile else _candidates(of)))


def _reach(axis: WindowAxis, positions: int) -> int:
    return (positions - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1


def direct_us(of: Geometry, sizes: Mapping[str, int], sms: int) -> float | None:
    """The time that it is expected to take; None where it has no room."""
    if not fits(of):
        return None
    moved = 4 * (of.source_elements(sizes) + of.result_elements(sizes))
    if is_plane(of):
        return moved / PLANE_BYTES_PER_US + CALL_US
    tile = best_tile(of, sizes, sms)
    again = _bytes(of, tile, _layers(of)) > SHARED_BYTES
    reads = _layers(of) * _patch(of, tile) * (-(-of.results // tile.outs) if again else 1)
    results = tile.height * tile.across * _padded(of.results, tile.outs)
    terms = RESULT_CYCLES + TERM_CYCLES * of.channels * of.taps
    cycles = TILE_CYCLES + READ_CYCLES * reads + terms * results
    computed = max(-(-_tiles(of, tile, sizes) // sms), ALONE) * cycles / CYCLES_PER_US
    return max(computed, moved / BYTES_PER_US) + CALL_US
