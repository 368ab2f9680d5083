"""Convolutions on tensor cores: their bands, which of them fit, their time, and PyTorch's time.

Results are computed band after band; a band is some columns of the image. A narrow band wastes its
halos. A wide band has long rows between two taps, which must fit into shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fusewright.ir.convolution import Geometry
from fusewright.ir.graph import Sizes
from fusewright.target.facts import FITTED_ON
from fusewright.target.target import Target

TERMS = (1, 3)
MOST_POSITIONS, MOST_RINGS = 256, 4  # of kernels/convolution/tiling.cuh
TILE_CHANNELS = (64, 128)
STAGE_BYTES, PING_PONG_BYTES = 138 * 1024, 125 * 1024  # kStageBytes, kPingPongBytes of the same
NARROW_BYTES = 30 * 1024  # more in narrow tiles, whose weights are smaller
MOST_TAPS, MOST_PHASES = 128, 16
MOST_IMAGE_POSITIONS = 2**31 - 2**12  # a stage more must fit into 32 bits
CHANNEL_BLOCK = 64
PING_PONG_POSITIONS = 128  # of a tile with ping-pong
# Weight gradients: taps of a warpgroup, positions of a slab, the cost of a part in slabs.
GRADIENT_TAPS, GRADIENT_SLAB, PART_SLABS = 5, 128, 4
# Cycles of an SM: a wgmma of 64 positions, 16 channels and one result (the tensor cores' rate); an
# element to convert, and the epilogue of a result (H200, 2026-11-15).
WGMMA_CYCLES = 0.5
CONVERT_CYCLES = 0.35
FINISH_CYCLES = 0.45
SCATTERED = 1.6  # Results that are not contiguous take this many times as long.
CLOCK_SHARE = 1600 / FITTED_ON.cycles_per_us  # the share of the clock that the fit assumed
CALL_US = 18.0
# Short convolutions: less for the call, more for the rest (H200, 2026-11-17, 13 shapes).
SHORT_CALL_US, SHORT_REST = 10.0, 1.15
SPLIT_WEIGHTS_PER_US = 2.7e5
# PyTorch's convolutions in channels-last (H200, 2026-11-16, 31 shapes, GPU time only): operations
# in TF32, of transposed convolutions, of weight gradients, in float32 (used with few channels);
# bytes with groups, of its other kernels, of loops and copies.
PYTORCH_FLOPS_PER_US = 330e6
GATHERED_FLOPS_PER_US = 200e6
GRADIENT_FLOPS_PER_US = 155e6
EXACT_FLOPS_PER_US = 25e6
# The same for volumes with few channels (H200, 2026-11-16, five shapes).
VOLUME_FLOPS_PER_US, VOLUME_GATHERED_FLOPS_PER_US = 15e6, 5e6
GROUPED_BYTES_PER_US, DEPTHWISE_BYTES_PER_US = 0.65e6, 1.2e6
PYTORCH_BYTES_PER_US, LOOP_BYTES_PER_US = 3e6, 4e6
PYTORCH_US = 24.0
WIDE_RESULTS = 128  # With fewer, tiles are partly empty.
FEW_CHANNELS = 32
# Our weight gradients: operations, those in halos included; the share that remains with strides and
# dilations.
GRADIENT_OF_OURS_FLOPS_PER_US, GRADIENT_US, PYTORCH_GRADIENT_US = 250e6, 30.0, 8.0
STRIDED_SHARE, DILATED_SHARE = 0.35, 0.6
FEWEST_CHANNELS = 8  # With fewer, a step of 16 channels is mostly empty.
FEWEST_GATHERED = 8  # results of a strided transposed one; with fewer, cuDNN uses float32


def pitch_of(of: Geometry, band_width: int, lanes: int = 4) -> int:
    """Positions from one row to the next; see `lay_out` of kernels/convolution/taps.cuh."""
    whole = band_width == of.x.positions
    across = of.x.extent if whole else band_width + of.x.halo
    lanes = math.gcd(lanes, band_width)
    return -(-across // lanes) * lanes


def tile_positions(of: Geometry, terms: int) -> int:
    """kTilePositions of kernels/sm90/convolution/sm90_convolution_load.cuh."""
    return MOST_POSITIONS if terms == 1 and best_tile_channels(of) <= 64 else 128


def group_positions(of: Geometry, terms: int) -> int:
    """How far rings overlap: kPositions of sm90_convolution_load.cuh."""
    return tile_positions(of, terms) // (2 if best_tile_channels(of) == 64 else 1)


def stage_rows(of: Geometry, band_width: int, terms: int) -> int:
    """Positions of a tile and of its halo."""
    return rows_for(of, band_width, tile_positions(of, terms))


def rows_for(of: Geometry, band_width: int, positions: int) -> int:
    """The rows of a stage for a tile of so many positions."""
    reach = of.y.halo * pitch_of(of, band_width) + of.x.halo
    return -(-(positions + reach) // 8) * 8


def converted_rows(of: Geometry, band_width: int, terms: int) -> int:
    """Rows of a stage that the previous tile has not converted, if rings of rows fit."""
    rows, row_bytes = stage_rows(of, band_width, terms), 128 if terms == 1 else 256
    rings = -(-of.channels // CHANNEL_BLOCK) * len(of.phases)
    few = len(of.residue_classes) == 1 and rings <= MOST_RINGS
    narrow = terms == 1 and best_tile_channels(of) == TILE_CHANNELS[0]
    room = STAGE_BYTES + (NARROW_BYTES if narrow else 0)
    walks = few and rings * (rows + group_positions(of, terms)) * row_bytes <= room
    return tile_positions(of, terms) if walks else rows


def fits(of: Geometry, band_width: int) -> bool:
    """Whether a stage fits into shared memory, with one part of each element and with two.

    The stages of a weight gradient then fit, too: they reach at most 849 and 425 rows, of 1024 and
    504.
    """
    rows = {terms: stage_rows(of, band_width, terms) for terms in TERMS}
    return max(rows[1] * 128, rows[3] * 256) <= STAGE_BYTES


def has_ping_pong(of: Geometry, band_width: int) -> bool:
    """Whether ping-pong is possible: a tile is one stage and has several parts, and two stages fit.
    The warp that refills the ring waits for the previous part, and so for all parts before it."""
    rows = rows_for(of, band_width, PING_PONG_POSITIONS) + 2 * PING_PONG_POSITIONS
    single = of.residue_classes == (of.phases,) and len(of.phases) == 1
    narrow = of.channels <= CHANNEL_BLOCK and of.results > 64
    return single and narrow and rows * 128 <= PING_PONG_BYTES


def band_widths(of: Geometry) -> Iterator[int]:
    """The widths that give equal bands; several bands have multiples of four."""
    width = of.x.positions
    yield from {min(width, -(-width // (4 * count)) * 4): None for count in range(1, width + 1)}


def best_band(of: Geometry) -> int | None:
    """The widest band: short rows are slower (H200: 126 columns 1.39 ms, in two bands 1.76 ms)."""
    return next((each for each in band_widths(of) if fits(of, each)), None)


def best_tile_channels(of: Geometry) -> int:
    """The narrowest tile that has all results of a group, or else the widest."""
    return next((each for each in TILE_CHANNELS if each >= of.results), TILE_CHANNELS[-1])


def tensor_core_us(of: Geometry, terms: int, sizes: Sizes, target: Target) -> float | None:
    """The expected time of our convolution. None if it does not fit."""
    band = best_band(of)
    if band is None:
        return None
    images, channels, classes = of.images.at(sizes), best_tile_channels(of), len(of.residue_classes)
    tiles = of.groups * -(-of.results // channels) * classes
    positions = tile_positions(of, terms)
    whole = -(-image_positions(of, band) * images // positions) * tiles
    cycles = _tile_cycles(of, band, terms) / image_positions(of, band) * positions
    cycles = -(-whole // target.sms) * cycles / classes
    # Only the first tile of a thread block converts these rows.
    first = stage_rows(of, band, terms) - converted_rows(of, band, terms)
    cycles += CONVERT_CYCLES * first * of.channels
    return cycles / (CLOCK_SHARE * target.facts.cycles_per_us) + split_us(of) + CALL_US


def beside_staging_us(of: Geometry, sizes: Sizes, target: Target) -> float | None:
    """The expected time with one term, for comparison with a staged input."""
    found = tensor_core_us(of, 1, sizes, target)
    return None if found is None else min(found, SHORT_CALL_US + SHORT_REST * (found - CALL_US))


def split_us(of: Geometry) -> float:
    """The time to split the weights."""
    return of.filter_elements / SPLIT_WEIGHTS_PER_US


def image_positions(of: Geometry, band_width: int) -> int:
    """The positions of one image, with halos."""
    bands = -(-of.x.positions // band_width)
    return bands * of.z.deep * of.y.extent * pitch_of(of, band_width)


def _tile_cycles(of: Geometry, band_width: int, terms: int) -> float:
    """Cycles of the tiles of one image, of all residue classes."""
    positions, tile = tile_positions(of, terms), best_tile_channels(of)
    blocks, rest = divmod(of.channels, CHANNEL_BLOCK)
    steps = blocks * 4 + -(-rest // 16)
    channels = blocks * CHANNEL_BLOCK + -(-rest // 32) * 32
    finished = FINISH_CYCLES * positions * min(tile, of.used_results)
    finished *= SCATTERED if of.transposed and of.x.stride > 1 else 1.0
    tiles = image_positions(of, band_width) / positions
    cycles = 0.0
    for phases in of.residue_classes:
        multiplied = WGMMA_CYCLES * positions / 64 * tile * steps * sum(phases) * terms
        rows = converted_rows(of, band_width, terms) * sum(taps > 0 for taps in phases)
        cycles += max(multiplied, CONVERT_CYCLES * rows * channels) + finished
    return tiles * cycles


@dataclass(frozen=True)
class GradientWork:
    """How a weight gradient is divided: `units` of channels and sets of taps, each over all slabs
    of positions. A slab of a unit adds to `sums` blocks of 64 by 64 channels."""

    units: int
    slabs: int
    sums: float
    wide: bool  # Each warpgroup has its own 64 results.

    def parts(self, target: Target) -> int:
        """In how many parts the positions are summed, so that all SMs have work until the end
        (weight_gradient_parts of kernels/sm90/gradient/sm90_weight_gradient.cuh)."""
        waves = [(n, min(self.slabs, n * target.sms // self.units)) for n in range(1, 5)]
        found = [(n * (-(-self.slabs // p) + PART_SLABS), n, p) for n, p in waves if p]
        return min(found)[2] if found else 1


def _is_wide(of: Geometry) -> bool:
    """Whether the two warpgroups have different channels, each with all taps."""
    return of.results > 64 and max(of.phases) <= GRADIENT_TAPS


def _tap_sets(of: Geometry) -> list[int]:
    """The taps of each thread block, as in `gradient_sizes` of sm90_weight_gradient.cuh."""
    most = GRADIENT_TAPS if _is_wide(of) else 2 * GRADIENT_TAPS
    divided = [(taps, -(-taps // most)) for taps in of.phases if taps]
    return [
        taps * (at + 1) // count - taps * at // count
        for taps, count in divided
        for at in range(count)
    ]


def tap_counts(of: Geometry) -> list[int]:
    """The different numbers of taps that warpgroups have."""
    found = set(_tap_sets(of))
    if not _is_wide(of):
        found = {half for taps in found for half in (taps // 2, taps - taps // 2)}
    return sorted(found - {0})


def gradient_work(of: Geometry, band_width: int, sizes: Sizes) -> GradientWork:
    wide, sets = _is_wide(of), len(_tap_sets(of))
    tiles = -(-of.results // (128 if wide else 64)) * -(-of.channels // CHANNEL_BLOCK)
    row = -(-of.x.result // band_width) * pitch_of(of, band_width, 1)
    positions = of.images.at(sizes) * of.z.deep * of.y.extent * row
    sums = of.taps / sets * (2 if wide else 1)
    return GradientWork(of.groups * tiles * sets, -(-positions // GRADIENT_SLAB), sums, wide)


def gradient_us(of: Geometry, band_width: int, sizes: Sizes, target: Target) -> float:
    """The expected time of our weight gradient without staged inputs."""
    used = of.pixels / image_positions(of, band_width) * _filled(of)
    used *= target.facts.relative_compute
    used *= STRIDED_SHARE if of.strided else 1.0
    used *= DILATED_SHARE if any(axis.dilation > 1 for axis in of.axes) else 1.0
    return of.operations(sizes) / (GRADIENT_OF_OURS_FLOPS_PER_US * used) + GRADIENT_US


def pytorch_us(of: Geometry, sizes: Sizes, target: Target, channels_last: bool = False) -> float:
    """The expected time of PyTorch's convolution and of a loop after it.

    `channels_last`: the input is in channels-last anyway.
    """
    gpu, elements = target.facts, (of.result_elements(sizes), of.source_elements(sizes))
    results, sources = (4 * each / gpu.relative_memory for each in elements)
    operations = of.operations(sizes) / gpu.relative_compute
    follows = 2 * results / LOOP_BYTES_PER_US + PYTORCH_US
    if of.groups > 1 and of.channels < FEW_CHANNELS:
        depthwise = of.channels == of.results == 1
        rate = DEPTHWISE_BYTES_PER_US if depthwise else GROUPED_BYTES_PER_US
        return (results + sources) / rate + PYTORCH_US
    if not of.z.is_single and min(of.channels, of.results) < FEWEST_CHANNELS:
        rate = VOLUME_GATHERED_FLOPS_PER_US if of.transposed else VOLUME_FLOPS_PER_US
        return operations / rate + follows
    if of.channels < FEW_CHANNELS:
        return operations / EXACT_FLOPS_PER_US + follows
    rate = GATHERED_FLOPS_PER_US if of.transposed and of.strided else PYTORCH_FLOPS_PER_US
    multiplied = operations / (rate * _filled(of))
    as_it_is = channels_last or (of.taps == 1 and not of.strided)
    transposing = 0.0 if as_it_is else 2 * sources / LOOP_BYTES_PER_US
    return max(multiplied, (results + sources) / PYTORCH_BYTES_PER_US) + transposing + follows


def _filled(of: Geometry) -> float:
    """How full PyTorch's tiles are. Its kernels with narrower tiles lose half as much."""
    return min(1.0, (of.results / WIDE_RESULTS + 0.5) / 1.5)


def pytorch_gradient_us(of: Geometry, sizes: Sizes, target: Target) -> float:
    """The expected time of PyTorch's weight gradient and of a copy of the input in channels-last.
    The kernel that computes grad_output writes it in channels-last, without a copy."""
    gpu = target.facts
    rate = GRADIENT_FLOPS_PER_US * _filled(of) * gpu.relative_compute
    copied = 2 * 4 * of.source_elements(sizes) / gpu.relative_memory
    return of.operations(sizes) / rate + PYTORCH_GRADIENT_US + copied / LOOP_BYTES_PER_US


def gradient_is_worthwhile(of: Geometry, sizes: Sizes, target: Target) -> bool:
    """Whether our weight gradient is faster than PyTorch's, without shared staging. With one tap it
    is a matmul."""
    band = best_band(of)
    if band is None or of.channels < FEWEST_CHANNELS or of.taps == 1:
        return False
    return gradient_us(of, band, sizes, target) <= pytorch_gradient_us(of, sizes, target)


def is_possible(of: Geometry) -> bool:
    """Whether the taps, the phases and the rows fit into our kernel."""
    strides = of.y.stride * of.x.stride * (of.z.stride if of.transposed else 1)
    few = of.taps <= MOST_TAPS and strides <= MOST_PHASES and len(of.phases) <= MOST_PHASES
    band = best_band(of) if few else None
    return band is not None and image_positions(of.as_staged, band) < MOST_IMAGE_POSITIONS
