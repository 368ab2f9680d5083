"""Convolutions whose input is laid out as halves first (kernels/convolution/staged_input.cuh): which have room,
and how long they take.

Halves in memory come to the tensor cores without a thread's help; another kernel writes them. That
pays where an input is small against what is done with it, is read by phases of a stride, or has so
few channels that reading it is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusewright.cost.conv_tensor_core import (
    CHANNEL_BLOCK,
    GRADIENT_SLAB,
    best_band,
    gradient_work,
    image_positions,
    rows_for,
    split_us,
)
from fusewright.ir.convolution import Geometry, by_eight
from fusewright.ir.graph import ONE, Dim, TensorSpec

# Tiles that there are, what is copied at once, and the room for two stages (kLineBytes).
LINE_POSITIONS, LINE_BOX_ROWS, LINE_BYTES = (256, 128), 256, 137 * 1024
RESULTS = 64  # of a tile
BOX_ROWS, ROW_BYTES = 64, 128
KNOWN_BYTES = 16  # of an image's group: a scale and LineCounts
LANES = 4  # positions that rows begin at multiples of
# Cycles of a processor: a step of 16 channels for a position, the beginning of a stage, a result to
# finish, which two warpgroups do at the same time, one column at a time slower; bytes to and from
# memory, and from the second cache (H200, 2026-11-16, 25 shapes).
STEP_CYCLES, STAGE_CYCLES, FINISH_CYCLES, ALONE = 0.5, 300.0, 0.92, 1.5
CYCLES_PER_US = 1750.0
BYTES_PER_US, CACHE_BYTES_PER_US = 3.7e6, 6.5e6
CALL_US = 10.0  # of all three kernels
# Of the gradient by the weights: rows that are copied together, room for stages; a slab, each sum
# that it adds to, and all the rest (H200, 2026-11-17, ten shapes).
GRADIENT_BOX, GRADIENT_BYTES = 32, 226 * 1024
SLAB_US, SUM_US, GRADIENT_US = 0.6, 0.15, 50.0
SMALLER = 0.9  # what smaller tiles must be faster than larger ones
MEMORY = 2  # times that of input and result, at the most
GAIN = 0.91  # what it must be faster than other ways, for the memory that it takes


def with_shared_lines(of: Geometry, back: Geometry) -> tuple[Geometry, Geometry]:
    """A convolution and its gradient by the source, laid out so that positions of both lie equally
    far from each other: what one reads of the other's lines is a fixed number of rows further."""
    walks = [each.in_lines.axes for each in (of, back, by_eight(back))]
    extents = [max(axis.extent for axis in axes) for axes in zip(*walks, strict=True)]
    extents[-1] = -(-extents[-1] // LANES) * LANES  # what a pitch is rounded to
    return _with_least(of, extents), _with_least(back, extents)


def _with_least(of: Geometry, extents: Sequence[int]) -> Geometry:
    z, y, x = (replace(axis, least=n) for axis, n in zip(of.axes, extents, strict=True))
    return replace(of, z=z, y=y, x=x)


def line_stages(of: Geometry) -> float:
    """What a tile reads one after the other, on average: 64 channels of a phase each."""
    return -(-of.channels // CHANNEL_BLOCK) * len(of.phases) / len(of.classes)


def line_fits(of: Geometry, band_width: int, positions: int) -> bool:
    """Whether two stages find room."""
    rows = rows_for(of.in_lines, band_width, positions)
    boxes = -(-rows // LINE_BOX_ROWS)
    rows = boxes * (-(-rows // (8 * boxes)) * 8)
    return all(of.classes) and 2 * rows * ROW_BYTES <= LINE_BYTES


def line_bytes(of: Geometry, band_width: int) -> int:
    """Of an image: a row for each position, 64 channels and plane."""
    positions = image_positions(of.in_lines, band_width)
    return positions * of.groups * -(-of.channels // CHANNEL_BLOCK) * of.planes * ROW_BYTES


def line_memory(of: Geometry, band_width: int) -> Dim:
    """Bytes of lines, and of what is known of each image (lines_at of sm90_convolution.cuh)."""
    return of.images * (line_bytes(of, band_width) + KNOWN_BYTES * of.groups)


def lines_spec(of: Geometry, device: str) -> TensorSpec:
    """The memory of a convolution's lines, as it is walked."""
    return TensorSpec("uint8", (line_memory(of, of.x.positions),), (ONE,), device)


def best_line(of: Geometry, band_width: int, sizes: Mapping[str, int], sms: int) -> int:
    """The positions of a tile: where tiles are few, less. 0 where none fits."""
    fitting = [each for each in LINE_POSITIONS if line_fits(of, band_width, each)]
    took = {each: _tiles_us(of, band_width, each, sizes, sms) for each in fitting}
    least = min(took.values(), default=0.0)
    return next((each for each in fitting if SMALLER * took[each] <= least), 0)


def prefers_lines(
    of: Geometry, others_us: float | None, sizes: Mapping[str, int], sms: int
) -> bool:
    """Whether it is expected to be faster than so, and takes not far more memory."""
    found = line_us(of, sizes, sms)
    if found is None or not is_small(of):
        return False
    return others_us is None or found < GAIN * others_us


def is_small(of: Geometry) -> bool:
    """Whether lines take not far more memory than the convolution itself."""
    one, band = replace(of, images=ONE), best_band(of)
    numbers = one.source_elements({}) + one.result_elements({})
    return band is not None and line_bytes(of, band) <= MEMORY * 4 * numbers


def line_us(of: Geometry, sizes: Mapping[str, int], sms: int) -> float | None:
    """The time that it is expected to take; None where it has no room."""
    band = best_band(of)
    positions = best_line(of, band, sizes, sms) if band else 0
    if band is None or not positions:
        return None
    moved = _laid_out_us(of, band, sizes)
    return _tiles_us(of, band, positions, sizes, sms) + moved + split_us(of) + CALL_US


def _laid_out_us(of: Geometry, band_width: int, sizes: Mapping[str, int]) -> float:
    """Of the source: read as it is, written as lines."""
    written = line_bytes(of, band_width) * of.images.at(sizes)
    return (4 * of.source_elements(sizes) + written) / BYTES_PER_US


def line_gradient_us(of: Geometry, sizes: Mapping[str, int], sms: int) -> float | None:
    """The time that the gradient by the weights is expected to take where the other lines are there
    already; None where it has no room."""
    laid_out, band = of.in_lines, of.x.result
    work, rows = gradient_work(laid_out, band, sizes), rows_for(laid_out, band, 2 * GRADIENT_SLAB)
    rows = (-(-rows // GRADIENT_BOX) + 1) * GRADIENT_BOX  # the first ones twice
    stages = 2 * GRADIENT_SLAB * (2 if work.wide else 1)
    if (rows + stages) * ROW_BYTES > GRADIENT_BYTES:
        return None
    parts = work.parts(sms)
    slabs = -(-work.slabs // parts) * -(-work.units * parts // sms)
    moved = _laid_out_us(of, band, sizes)
    return moved + GRADIENT_US + slabs * (SLAB_US + SUM_US * work.sums)


def _tiles_us(
    of: Geometry, band_width: int, positions: int, sizes: Mapping[str, int], sms: int
) -> float:
    """Of the kernel that multiplies."""
    laid_out, classes = of.in_lines, len(of.classes)
    rows = image_positions(laid_out, band_width) * of.images.at(sizes)
    parts = -(-of.results // RESULTS) * of.groups
    tiles = -(-rows // positions) * parts * classes
    steps = -(-of.channels // 16) * of.taps / classes
    stages = line_stages(of)
    multiplied = STEP_CYCLES * positions * steps + STAGE_CYCLES * stages
    finished = FINISH_CYCLES * positions * min(of.used_results, RESULTS)
    finished *= ALONE if of.columns % 2 else 1.0
    each = -(-tiles // sms)
    by_turns = (each + 1) // 2 * (multiplied + finished) + (0 if each % 2 else multiplied)
    cycles = max(each * multiplied + finished, by_turns)
    read = rows_for(laid_out, band_width, positions) * stages / (parts if stages == 1 else 1)
    read = tiles * ROW_BYTES * (read + steps / 4 * BOX_ROWS)
    return max(cycles / CYCLES_PER_US, read / CACHE_BYTES_PER_US)
