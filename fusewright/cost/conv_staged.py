"""Convolutions that stage their input in fp16: which fit, their tiles and their time.

The kernels are in kernels/convolution/staged_input.cuh. TMA brings a staged input to the tensor
cores without threads; another kernel writes it. That pays if the input is small compared with the
work, if the phases of a stride read it, or if it has few channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusewright.cost import conv_tensor_core as tensor_core
from fusewright.cost.conv_tensor_core import CHANNEL_BLOCK, best_band, image_positions, rows_for
from fusewright.ir.convolution import Geometry, by_eight
from fusewright.ir.graph import ONE, Dim, Sizes, TensorSpec
from fusewright.target.facts import FITTED_ON
from fusewright.target.target import Target

# Positions of a tile, rows of one copy, and bytes for two stages (kStagedBytes).
STAGED_POSITIONS, STAGED_BOX_ROWS, STAGED_BYTES = (256, 128), 256, 137 * 1024
RESULTS = 64  # channels of a tile
BOX_ROWS, ROW_BYTES = 64, 128
KNOWN_BYTES = 16  # per image and group: a scale and StagedCounts
LANES = 4  # Rows begin at multiples of this many positions.
# Cycles of an SM: a step of 16 channels for a position, the start of a stage, the epilogue of a
# result (two warpgroups at the same time; one column at a time is slower); bytes to and from memory
# (H200, 2026-11-16, 25 shapes).
STEP_CYCLES, STAGE_CYCLES, FINISH_CYCLES, ALONE = 0.5, 300.0, 0.92, 1.5
CLOCK_SHARE = 1750 / FITTED_ON.cycles_per_us  # the share of the clock that the fit assumed
BYTES_PER_US = 3.7e6
CALL_US = 10.0  # launches of all three kernels
# Weight gradients: rows of one copy, bytes for stages; the time of a slab, of each sum that it adds
# to, and of the rest (H200, 2026-11-17, ten shapes).
GRADIENT_BOX, GRADIENT_BYTES = 32, 226 * 1024
SLAB_US, SUM_US, GRADIENT_US = 0.6, 0.15, 50.0
SMALLER = 0.9  # Smaller tiles must take at most this share of the time of larger ones.
MEMORY = 2  # the most memory of staged input, as a multiple of input and result
GAIN = 0.91  # the most time as a share of other methods, which need less memory


def with_shared_staging(of: Geometry, back: Geometry) -> tuple[Geometry, Geometry]:
    """A convolution and its input's gradient with the same distances between positions. What one
    reads of the other's staged input is then a fixed number of rows further."""
    walks = [each.as_staged.axes for each in (of, back, by_eight(back))]
    extents = [max(axis.extent for axis in axes) for axes in zip(*walks, strict=True)]
    extents[-1] = -(-extents[-1] // LANES) * LANES  # A pitch is rounded up like this.
    return _with_least(of, extents), _with_least(back, extents)


def _with_least(of: Geometry, extents: Sequence[int]) -> Geometry:
    z, y, x = (replace(axis, least=n) for axis, n in zip(of.axes, extents, strict=True))
    return replace(of, z=z, y=y, x=x)


def staged_stages(of: Geometry) -> float:
    """The average number of stages of a tile: 64 channels of a phase each."""
    return -(-of.channels // CHANNEL_BLOCK) * len(of.phases) / len(of.residue_classes)


def staged_fits(of: Geometry, band_width: int, positions: int) -> bool:
    """Whether two stages fit into shared memory."""
    rows = rows_for(of.as_staged, band_width, positions)
    boxes = -(-rows // STAGED_BOX_ROWS)
    rows = boxes * (-(-rows // (8 * boxes)) * 8)
    return all(of.residue_classes) and 2 * rows * ROW_BYTES <= STAGED_BYTES


def staged_bytes(of: Geometry, band_width: int) -> int:
    """The staged input of an image: a row for each position, 64 channels and plane."""
    positions = image_positions(of.as_staged, band_width)
    return positions * of.groups * -(-of.channels // CHANNEL_BLOCK) * of.planes * ROW_BYTES


def staged_memory(of: Geometry, band_width: int) -> Dim:
    """Bytes of the staged input, with each image's scale (staged_at of sm90_convolution.cuh)."""
    return of.images * (staged_bytes(of, band_width) + KNOWN_BYTES * of.groups)


def staged_spec(of: Geometry, device: str) -> TensorSpec:
    """The tensor of a convolution's staged input."""
    return TensorSpec("uint8", (staged_memory(of, of.x.positions),), (ONE,), device)


def best_staged(of: Geometry, band_width: int, sizes: Sizes, target: Target) -> int:
    """The positions of a tile; fewer if there are few tiles. 0 if no tile fits."""
    fitting = [each for each in STAGED_POSITIONS if staged_fits(of, band_width, each)]
    took = {each: _tiles_us(of, band_width, each, sizes, target) for each in fitting}
    least = min(took.values(), default=0.0)
    return next((each for each in fitting if SMALLER * took[each] <= least), 0)


def prefers_staging(of: Geometry, others_us: float | None, sizes: Sizes, target: Target) -> bool:
    """Whether staging is expected to be faster than `others_us`, and needs not much memory."""
    found = staged_us(of, sizes, target)
    if found is None or not is_small(of):
        return False
    return others_us is None or found < GAIN * others_us


def is_small(of: Geometry) -> bool:
    """Whether the staged input needs not much more memory than the convolution itself."""
    one, band = replace(of, images=ONE), best_band(of)
    elements = one.source_elements({}) + one.result_elements({})
    return band is not None and staged_bytes(of, band) <= MEMORY * 4 * elements


def staged_us(of: Geometry, sizes: Sizes, target: Target) -> float | None:
    """The expected time. None if it does not fit."""
    band = best_band(of)
    positions = best_staged(of, band, sizes, target) if band else 0
    if band is None or not positions:
        return None
    before = _staging_us(of, band, sizes, target) + tensor_core.split_us(of)
    return _tiles_us(of, band, positions, sizes, target) + before + CALL_US


def _staging_us(of: Geometry, band_width: int, sizes: Sizes, target: Target) -> float:
    """The time to read the input and write the staged input."""
    written = staged_bytes(of, band_width) * of.images.at(sizes)
    rate = BYTES_PER_US * target.facts.relative_memory
    return (4 * of.source_elements(sizes) + written) / rate


def staged_gradient_us(of: Geometry, sizes: Sizes, target: Target) -> float | None:
    """The expected time of the weight gradient if the other input is staged already. None if it
    does not fit."""
    laid_out, band, slab = of.as_staged, of.x.result, tensor_core.GRADIENT_SLAB
    work = tensor_core.gradient_work(laid_out, band, sizes)
    rows = rows_for(laid_out, band, 2 * slab)
    rows = (-(-rows // GRADIENT_BOX) + 1) * GRADIENT_BOX  # the first box twice
    stages = 2 * slab * (2 if work.wide else 1)
    if (rows + stages) * ROW_BYTES > GRADIENT_BYTES:
        return None
    parts = work.parts(target)
    slabs = -(-work.slabs // parts) * -(-work.units * parts // target.sms)
    staged = _staging_us(of, band, sizes, target)
    return staged + GRADIENT_US + slabs * (SLAB_US + SUM_US * work.sums)


def _tiles_us(of: Geometry, band_width: int, positions: int, sizes: Sizes, target: Target) -> float:
    """The time of the kernel that multiplies."""
    laid_out, classes = of.as_staged, len(of.residue_classes)
    rows = image_positions(laid_out, band_width) * of.images.at(sizes)
    parts = -(-of.results // RESULTS) * of.groups
    tiles = -(-rows // positions) * parts * classes
    steps = -(-of.channels // 16) * of.taps / classes
    stages = staged_stages(of)
    multiplied = STEP_CYCLES * positions * steps + STAGE_CYCLES * stages
    finished = FINISH_CYCLES * positions * min(of.used_results, RESULTS)
    finished *= ALONE if of.columns % 2 else 1.0
    each = -(-tiles // target.sms)
    by_ping_pong = (each + 1) // 2 * (multiplied + finished) + (0 if each % 2 else multiplied)
    cycles = max(each * multiplied + finished, by_ping_pong)
    read = rows_for(laid_out, band_width, positions) * stages / (parts if stages == 1 else 1)
    read = tiles * ROW_BYTES * (read + steps / 4 * BOX_ROWS)
    gpu = target.facts
    return max(cycles / (CLOCK_SHARE * gpu.cycles_per_us), read / gpu.l2_bytes_per_us)
