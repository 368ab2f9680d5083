"""Direct convolutions: which fit, their tiles and their time.

With few channels, or many groups, tensor cores would mostly multiply zeros. The kernels are
direct_convolution.cuh and depthwise_convolution.cuh of kernels/convolution.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusewright.ir.convolution import ConvAxis, Geometry
from fusewright.ir.graph import Sizes
from fusewright.target.facts import FITTED_ON
from fusewright.target.target import Target

THREADS = 128  # kDirectThreads
ACROSS, ROWS, OUTS = (32, 16, 8), (8, 4, 2, 1), (8, 4, 2, 1)
MOST_TAPS = 49
THIN = 16  # channels of one step of the tensor cores
SHARED_BYTES = 112 * 1024  # kDirectBytes
# The cost of a tap beyond a thread's first row, if one result shares it; the cost of short rows.
TAP_SHARE = 0.5
SHORT_ROW = 4
# Cycles of an SM per tile, per element read, per result and per term of a result (H200, 2026-11-16,
# four convolutions).
TILE_CYCLES, READ_CYCLES, RESULT_CYCLES, TERM_CYCLES = 700.0, 0.45, 0.2, 0.015
CLOCK_SHARE = 1700 / FITTED_ON.cycles_per_us  # the share of the clock that the fit assumed
ALONE = 3  # A tile alone on an SM takes this many times as long.
BYTES_PER_US = 2.8e6
CALL_US = 5.0
BLOCKS = 4  # tiles on an SM at once
# Depthwise: the least threads of an SM. Weight gradients: thread blocks of an SM, and the least
# positions of a block.
DEPTHWISE_THREADS = 1024
DEPTHWISE_BLOCKS, DEPTHWISE_POSITIONS = 8, 2048
STRIPS = range(14, 3, -1)  # rows of a thread in a weight gradient
MOST_PARTS = 2**16 - 1
MOST_GATHERED = 16  # positions of a stride, all of one thread
DEPTHWISE_SUM_BYTES_PER_US = 2.5e6


@dataclass(frozen=True)
class DirectSchedule:
    """A thread computes `outs` results at `rows` positions; a row has `across` threads. A depthwise
    convolution has no tiles: `across` is 0.

    With `staged_positions` this is for exact fp32 only. With TF32 tensor cores multiply the staged
    fp16 input, as in a ConvolutionSchedule.
    """

    outs: int
    rows: int
    across: int
    staged_positions: int = 0

    @property
    def height(self) -> int:
        return THREADS // self.across * self.rows


def best_tile(of: Geometry, sizes: Sizes, target: Target) -> DirectSchedule:
    """The tile with little waste, much sharing of reads, and work for all SMs."""
    if is_depthwise(of):
        planes = of.images.at(sizes) * of.groups * of.results * of.x.result
        threads = target.sms * DEPTHWISE_THREADS
        few = [rows for rows in ROWS if planes * -(-of.y.result // rows) >= threads]
        return DirectSchedule(1, next((rows for rows in few if rows < 2 * of.y.result), 1), 0)

    def cost(tile: DirectSchedule) -> tuple[bool, float]:
        again = of.results > tile.outs and _bytes(of, tile, _layers(of)) > SHARED_BYTES
        padded = _padded(of.y.result, tile.height) * _padded(of.x.result, tile.across)
        taps = 1 + TAP_SHARE * (of.y.taps - 1) / (tile.rows * tile.outs**0.5)
        idle = max(1.0, target.sms * BLOCKS / _tiles(of, tile, sizes))
        return again, padded * taps * (1 + SHORT_ROW / tile.across) * idle

    return min(_with_room(of, _candidates(of)), key=cost)


def _candidates(of: Geometry) -> list[DirectSchedule]:
    outs = next((each for each in OUTS if each <= of.results), 1)
    outs = outs if outs == of.results or outs == OUTS[0] else 2 * outs
    return [DirectSchedule(outs, rows, across) for across in ACROSS for rows in ROWS]


def _with_room(of: Geometry, tiles: Iterable[DirectSchedule]) -> list[DirectSchedule]:
    """The tiles whose weights and one layer fit into shared memory."""
    return [each for each in tiles if each.across and _bytes(of, each, 1) <= SHARED_BYTES]


def is_depthwise(of: Geometry) -> bool:
    """Whether a group has one channel, and the convolution is not along z."""
    return of.channels == 1 and of.z.is_single


def has_depthwise_gradient(of: Geometry) -> bool:
    """Whether the weight gradient is summed plane by plane. A thread keeps the sums of all taps."""
    return is_depthwise(of) and not of.transposed and of.taps <= MOST_TAPS


def depthwise_gradient_rows(of: Geometry) -> int:
    """Rows of a thread's strip: many, to share reads, with few rows left over."""
    fitting = [rows for rows in STRIPS if rows <= of.y.result]
    return max(fitting, key=lambda rows: -(of.y.result % rows), default=max(of.y.result, 1))


def depthwise_gradient_parts(of: Geometry, sizes: Sizes, target: Target) -> int:
    """How many parts share the strips: work for all SMs, and enough for each."""
    strips = of.images.at(sizes) * max(1, of.y.result // depthwise_gradient_rows(of))
    positions = of.images.at(sizes) * of.y.result * of.x.result
    wanted = -(-target.sms * DEPTHWISE_BLOCKS // (of.groups * of.results))
    parts = max(1, min(wanted, positions // DEPTHWISE_POSITIONS, strips, MOST_PARTS))
    return -(-strips // -(-strips // parts)) if strips else 1  # No part is empty.


def _tiles(of: Geometry, tile: DirectSchedule, sizes: Sizes) -> int:
    """The number of tiles of all images and groups."""
    tiles = -(-of.y.result // tile.height) * -(-of.x.result // tile.across)
    return tiles * of.images.at(sizes) * of.z.result * of.groups


def _layers(of: Geometry) -> int:
    """Channels times taps along z."""
    return of.channels * of.z.taps


def _bytes(of: Geometry, tile: DirectSchedule, layers: int) -> int:
    """Shared memory for two patches of so many layers, and the weights of one or two groups."""
    weights = _padded(of.channels * of.taps * _padded(of.results, tile.outs), 4)
    return 4 * (2 * layers * _patch(of, tile) + weights * (2 if of.groups > 1 else 1))


def _patch(of: Geometry, tile: DirectSchedule) -> int:
    """The elements of a layer that a tile reads."""
    return _reach(of.y, tile.height) * _reach(of.x, tile.across)


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def fits(of: Geometry, tile: DirectSchedule | None = None) -> bool:
    """Whether the convolution is thin, and this tile, or any, fits into shared memory."""
    if of.y.taps * of.x.taps > MOST_TAPS or min(of.channels, of.results) >= THIN:
        return False
    if is_depthwise(of) and (tile is None or not tile.across):
        return not of.transposed or of.y.stride * of.x.stride <= MOST_GATHERED
    if of.transposed and of.strided:
        return False
    return bool(_with_room(of, (tile,) if tile else _candidates(of)))


def _reach(axis: ConvAxis, positions: int) -> int:
    return (positions - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1


def direct_us(of: Geometry, sizes: Sizes, target: Target) -> float | None:
    """The expected time. None if it does not fit."""
    if not fits(of):
        return None
    moved = 4 * (of.source_elements(sizes) + of.result_elements(sizes))
    gpu = target.facts
    if is_depthwise(of):
        return moved / (DEPTHWISE_SUM_BYTES_PER_US * gpu.relative_memory) + CALL_US
    tile = best_tile(of, sizes, target)
    again = _bytes(of, tile, _layers(of)) > SHARED_BYTES
    reads = _layers(of) * _patch(of, tile) * (-(-of.results // tile.outs) if again else 1)
    results = tile.height * tile.across * _padded(of.results, tile.outs)
    terms = RESULT_CYCLES + TERM_CYCLES * of.channels * of.taps
    cycles = TILE_CYCLES + READ_CYCLES * reads + terms * results
    cycles *= max(-(-_tiles(of, tile, sizes) // target.sms), ALONE)
    computed = cycles / (CLOCK_SHARE * gpu.cycles_per_us)
    return max(computed, moved / (BYTES_PER_US * gpu.relative_memory)) + CALL_US
