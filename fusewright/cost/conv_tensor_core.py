"""What a convolution of ours is expected to cost: how to cut its result into bands, and when to.

Results are walked in a line, band after band, a band being some columns of the image. A narrow band
wastes what lies in the halo beside it, a wide one makes the rows between two taps long, which
have to find room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusewright.ir.convolution import Geometry

TERMS = (1, 3)
MOST_POSITIONS, MOST_RINGS = 256, 4  # of kernels/convolution/tiling.cuh
TILE_CHANNELS = (64, 128)
STAGE_BYTES, TURN_BYTES = 138 * 1024, 125 * 1024  # kStageBytes, kTurnBytes of the same
NARROW_BYTES = 30 * 1024  # that the weights of narrow tiles leave besides
MOST_TAPS, MOST_PHASES = 128, 16
MOST_PLACES = 2**31 - 2**12  # of an image and a stage behind it
CHANNEL_BLOCK = 64
TURN_POSITIONS = 128  # of a tile, where warpgroups take turns
# Of the gradient by the weights: taps of a warpgroup, positions of a slab, slabs that a part costs.
GRADIENT_TAPS, GRADIENT_SLAB, PART_SLABS = 5, 128, 4
# Cycles of a processor: a product of 64 positions, 16 channels and one result; a number to convert;
# a result to finish. The first is the tensor cores', the others are from an H200, 2026-11-15.
PRODUCT_CYCLES = 0.5
CONVERT_CYCLES = 0.35
FINISH_CYCLES = 0.45
SCATTERED = 1.6  # times as long take results that do not lie beside each other
CYCLES_PER_US = 1600.0
CALL_US = 18.0
# Short ones took less for the call, and more for the rest (H200, 2026-11-17, 13 shapes).
SHORT_CALL_US, SHORT_REST = 10.0, 1.15
SPLIT_WEIGHTS_PER_US = 2.7e5
# PyTorch's library in channels-last (H200, 2026-11-16, 31 shapes, the GPU's time alone): operations
# of its kernels in TF32, of transposed ones, gradients by weights; in float32, to which it keeps
# with few channels; bytes of its kernels for groups, of its other kernels, of loops and copies.
LIBRARY_FLOPS_PER_US = 330e6
GATHERED_FLOPS_PER_US = 200e6
GRADIENT_FLOPS_PER_US = 155e6
EXACT_FLOPS_PER_US = 25e6
# The same of volumes with few channels (H200, 2026-11-16, five shapes).
VOLUME_FLOPS_PER_US, VOLUME_GATHERED_FLOPS_PER_US = 15e6, 5e6
GROUPED_BYTES_PER_US, DEPTHWISE_BYTES_PER_US = 0.65e6, 1.2e6
LIBRARY_BYTES_PER_US, LOOP_BYTES_PER_US = 3e6, 4e6
LIBRARY_US = 24.0
WIDE_RESULTS = 128  # fewer leave tiles partly empty
FEW_CHANNELS = 32
# Ours, by the weights: operations, of which those in halos are in vain; what strides and dilations
# leave of it.
GRADIENT_OF_OURS_FLOPS_PER_US, GRADIENT_US, LIBRARY_GRADIENT_US = 250e6, 30.0, 8.0
STRIDED_SHARE, DILATED_SHARE = 0.35, 0.6
FEWEST_CHANNELS = 8  # fewer leave most of a step of 16 empty
FEWEST_GATHERED = 8  # results of a transposed one with strides; the library does not round fewer


def pitch_of(of: Geometry, band_width: int, lanes: int = 4) -> int:
    """Positions between the beginnings of two rows; `lay_out` of kernels/convolution/taps.cuh."""
    whole = band_width == of.x.positions
    across = of.x.extent if whole else band_width + of.x.halo
    lanes = math.gcd(lanes, band_width)
    return -(-across // lanes) * lanes


def tile_positions(of: Geometry, terms: int) -> int:
    """kTilePositions of kernels/sm90/convolution/sm90_convolution_load.cuh."""
    return MOST_POSITIONS if terms == 1 and best_tile_channels(of) <= 64 else 128


def group_positions(of: Geometry, terms: int) -> int:
    """kGroupPositions of kernels/sm90/convolution/sm90_convolution_load.cuh, which is how far rings overlap."""
    return tile_positions(of, terms) // (2 if best_tile_channels(of) == 64 else 1)


def stage_rows(of: Geometry, band_width: int, terms: int) -> int:
    """Positions of a tile, and what the furthest tap reads beyond them."""
    return rows_for(of, band_width, tile_positions(of, terms))


def rows_for(of: Geometry, band_width: int, positions: int) -> int:
    """The same for a tile of so many positions."""
    reach = of.y.halo * pitch_of(of, band_width) + of.x.halo
    return -(-(positions + reach) // 8) * 8


def converted_rows(of: Geometry, band_width: int, terms: int) -> int:
    """Those of a stage that the tile before has not converted, where rings of rows find room."""
    rows, half_bytes = stage_rows(of, band_width, terms), 128 if terms == 1 else 256
    rings = -(-of.channels // CHANNEL_BLOCK) * len(of.phases)
    few = len(of.classes) == 1 and rings <= MOST_RINGS
    narrow = terms == 1 and best_tile_channels(of) == TILE_CHANNELS[0]
    room = STAGE_BYTES + (NARROW_BYTES if narrow else 0)
    walks = few and rings * (rows + group_positions(of, terms)) * half_bytes <= room
    return tile_positions(of, terms) if walks else rows


def fits(of: Geometry, band_width: int) -> bool:
    """Whether a stage finds room, with one half of each number and with two.

    What a gradient by the weights keeps in shared memory then finds room, too: at the most 849 and
    425 rows of reach, of 1024 and 504.
    """
    rows = {terms: stage_rows(of, band_width, terms) for terms in TERMS}
    return max(rows[1] * 128, rows[3] * 256) <= STAGE_BYTES


def has_turns(of: Geometry, band_width: int) -> bool:
    """Whether a tile is a single stage, of which two or more find room, and has several parts:
    who refills the ring waits for the part before, and so for all parts before that."""
    stage = rows_for(of, band_width, TURN_POSITIONS)
    single = of.channels <= CHANNEL_BLOCK and of.classes == (of.phases,) and len(of.phases) == 1
    return single and of.results > 64 and (stage + 2 * TURN_POSITIONS) * 128 <= TURN_BYTES


def band_widths(of: Geometry) -> Iterator[int]:
    """The widths that cut positions into equal bands, multiples of four if there are several."""
    width = of.x.positions
    yield from {min(width, -(-width // (4 * count)) * 4): None for count in range(1, width + 1)}


def best_band(of: Geometry) -> int | None:
    """The widest: short rows are slow to read and write (H200: 126 wide 1.39, in two 1.76 ms)."""
    return next((each for each in band_widths(of) if fits(of, each)), None)


def best_tile_channels(of: Geometry) -> int:
    """The narrowest tile that has all results of a group, or the widest there is."""
    return next((each for each in TILE_CHANNELS if each >= of.results), TILE_CHANNELS[-1])


def window_us(of: Geometry, terms: int, sizes: Mapping[str, int], sms: int) -> float | None:
    """The time that a convolution of ours is expected to take; None where it has no room."""
    band = best_band(of)
    if band is None:
        return None
    images, channels, classes = of.images.at(sizes), best_tile_channels(of), len(of.classes)
    tiles = of.groups * -(-of.results // channels) * classes
    positions = tile_positions(of, terms)
    whole = -(-image_positions(of, band) * images // positions) * tiles
    cycles = _tile_cycles(of, band, terms) / image_positions(of, band) * positions
    cycles = -(-whole // sms) * cycles / classes
    # What a thread block's first tile reads, and others find there.
    first = stage_rows(of, band, terms) - converted_rows(of, band, terms)
    cycles += CONVERT_CYCLES * first * of.channels
    return cycles / CYCLES_PER_US + split_us(of) + CALL_US


def beside_lines_us(of: Geometry, sizes: Mapping[str, int], sms: int) -> float | None:
    """The time with one term where it is compared with that of lines."""
    found = window_us(of, 1, sizes, sms)
    return None if found is None else min(found, SHORT_CALL_US + SHORT_REST * (found - CALL_US))


def split_us(of: Geometry) -> float:
    """The time that it takes to split the weights."""
    return of.filter_elements / SPLIT_WEIGHTS_PER_US


def image_positions(of: Geometry, band_width: int) -> int:
    """Of one image, what lies in halos counted in."""
    bands = -(-of.x.positions // band_width)
    return bands * of.z.deep * of.y.extent * pitch_of(of, band_width)


def _tile_cycles(of: Geometry, band_width: int, terms: int) -> float:
    """Of as many tiles as an image has, of all classes."""
    positions, tile = tile_positions(of, terms), best_tile_channels(of)
    blocks, rest = divmod(of.channels, CHANNEL_BLOCK)
    steps = blocks * 4 + -(-rest // 16)
    channels = blocks * CHANNEL_BLOCK + -(-rest // 32) * 32
    finished = FINISH_CYCLES * positions * min(tile, of.used_results)
    finished *= SCATTERED if of.transposed and of.x.stride > 1 else 1.0
    tiles = image_positions(of, band_width) / positions
    cycles = 0.0
    for phases in of.classes:
        multiplied = PRODUCT_CYCLES * positions / 64 * tile * steps * sum(phases) * terms
        rows = converted_rows(of, band_width, terms) * sum(taps > 0 for taps in phases)
        cycles += max(multiplied, CONVERT_CYCLES * rows * channels) + finished
    return tiles * cycles


@dataclass(frozen=True)
class GradientWork:
    """How the gradient by the weights is divided: `units` of channels and sets of taps, each over
    all slabs of positions; and the sums of 64 by 64 channels that a slab of a unit adds to."""

    units: int
    slabs: int
    sums: float
    wide: bool  # a warpgroup's 64 results each

    def parts(self, sms: int) -> int:
        """In how many parts of the positions it is summed, so that all processors have work to the
        end (window_gradient_parts of kernels/sm90/gradient/sm90_weight_gradient.cuh)."""
        found = []
        for waves in range(1, 5):
            parts = min(self.slabs, waves * sms // self.units)
            if parts:
                found.append((waves * (-(-self.slabs // parts) + PART_SLABS), waves, parts))
        return min(found)[2] if found else 1


def _is_wide(of: Geometry) -> bool:
    """Whether both warpgroups that multiply have channels of their own, and all taps."""
    return of.results > 64 and max(of.phases) <= GRADIENT_TAPS


def _tap_sets(of: Geometry) -> list[int]:
    """How many taps the thread blocks take; gradient_sizes of kernels/sm90/gradient/sm90_weight_gradient.cuh."""
    most = GRADIENT_TAPS if _is_wide(of) else 2 * GRADIENT_TAPS
    divided = [(taps, -(-taps // most)) for taps in of.phases if taps]
    return [
        taps * (at + 1) // count - taps * at // count
        for taps, count in divided
        for at in range(count)
    ]


def tap_counts(of: Geometry) -> list[int]:
    """How many taps warpgroups have, some these and others those."""
    found = set(_tap_sets(of))
    if not _is_wide(of):
        found = {half for taps in found for half in (taps // 2, taps - taps // 2)}
    return sorted(found - {0})


def gradient_work(of: Geometry, band_width: int, sizes: Mapping[str, int]) -> GradientWork:
    wide, sets = _is_wide(of), len(_tap_sets(of))
    tiles = -(-of.results // (128 if wide else 64)) * -(-of.channels // CHANNEL_BLOCK)
    line = -(-of.x.result // band_width) * pitch_of(of, band_width, 1)
    positions = of.images.at(sizes) * of.z.deep * of.y.extent * line
    sums = of.taps / sets * (2 if wide else 1)
    return GradientWork(of.groups * tiles * sets, -(-positions // GRADIENT_SLAB), sums, wide)


def gradient_us(of: Geometry, band_width: int, sizes: Mapping[str, int]) -> float:
    """The time that ours is expected to take, converting what it reads."""
    used = of.pixels / image_positions(of, band_width) * _filled(of)
    used *= STRIDED_SHARE if of.strided else 1.0
    used *= DILATED_SHARE if any(axis.dilation > 1 for axis in of.axes) else 1.0
    return of.operations(sizes) / (GRADIENT_OF_OURS_FLOPS_PER_US * used) + GRADIENT_US


def library_us(of: Geometry, sizes: Mapping[str, int], turned: bool = False) -> float:
    """The time that PyTorch's own convolution, and a loop after it, are expected to take.

    `turned`: someone else needs the source in channels-last, too.
    """
    results, sources = 4 * of.result_elements(sizes), 4 * of.source_elements(sizes)
    follows = 2 * results / LOOP_BYTES_PER_US + LIBRARY_US
    if of.groups > 1 and of.channels < FEW_CHANNELS:
        depthwise = of.channels == of.results == 1
        rate = DEPTHWISE_BYTES_PER_US if depthwise else GROUPED_BYTES_PER_US
        return (results + sources) / rate + LIBRARY_US
    if not of.z.is_single and min(of.channels, of.results) < FEWEST_CHANNELS:
        rate = VOLUME_GATHERED_FLOPS_PER_US if of.transposed else VOLUME_FLOPS_PER_US
        return of.operations(sizes) / rate + follows
    if of.channels < FEW_CHANNELS:
        return of.operations(sizes) / EXACT_FLOPS_PER_US + follows
    rate = GATHERED_FLOPS_PER_US if of.transposed and of.strided else LIBRARY_FLOPS_PER_US
    multiplied = of.operations(sizes) / (rate * _filled(of))
    as_it_is = turned or (of.taps == 1 and not of.strided)
    turning = 0.0 if as_it_is else 2 * sources / LOOP_BYTES_PER_US
    return max(multiplied, (results + sources) / LIBRARY_BYTES_PER_US) + turning + follows


def _filled(of: Geometry) -> float:
    """How full tiles of the library are; kernels of narrower ones are half as bad."""
    return min(1.0, (of.results / WIDE_RESULTS + 0.5) / 1.5)


def library_gradient_us(of: Geometry, sizes: Mapping[str, int]) -> float:
    """The time that PyTorch's own gradient by the weights is expected to take, and a copy of the
    source in channels-last. Gradients of results come as they are wanted: whoever makes them
    writes them so."""
    multiplied = of.operations(sizes) / (GRADIENT_FLOPS_PER_US * _filled(of))
    turned = 2 * 4 * of.source_elements(sizes) / LOOP_BYTES_PER_US
    return multiplied + LIBRARY_GRADIENT_US + turned


def gradient_is_worthwhile(of: Geometry, sizes: Mapping[str, int]) -> bool:
    """Whether the gradient by the weights is ours rather than the library's, each for itself. With
    one tap it is a product like any other."""
    band = best_band(of)
    if band is None or of.channels < FEWEST_CHANNELS or of.taps == 1:
        return False
    return gradient_us(of, band, sizes) <= library_gradient_us(of, sizes)


def is_possible(of: Geometry) -> bool:
    """Whether the kernel finds room for the taps, the phases and the rows."""
    strides = of.y.stride * of.x.stride * (of.z.stride if of.transposed else 1)
    few = of.taps <= MOST_TAPS and strides <= MOST_PHASES and len(of.phases) <= MOST_PHASES
    band = best_band(of) if few else None
    return band is not None and image_positions(of.in_lines, band) < MOST_PLACES
