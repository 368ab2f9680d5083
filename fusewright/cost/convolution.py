"""Which of our ways a convolution takes, and whether it is ours rather than the library's."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from fusewright.cost.conv_direct import direct_us, is_plane
from fusewright.cost.conv_staged import (
    BYTES_PER_US,
    is_small,
    line_gradient_us,
    line_us,
    with_shared_lines,
)
from fusewright.cost.conv_tensor_core import (
    FEW_CHANNELS,
    FEWEST_CHANNELS,
    FEWEST_GATHERED,
    LOOP_BYTES_PER_US,
    beside_lines_us,
    best_band,
    gradient_is_worthwhile,
    gradient_us,
    library_gradient_us,
    library_us,
    window_us,
)
from fusewright.ir.convolution import Geometry, by_eight

GAIN = 0.95
SHARED_GAIN = 0.9  # for two kernels more (H200, 64 images: 256 and 334 µs before, 263 and 337 so)
STRIDED_LIBRARY = 1.25  # times as long (H200, 3×3 of 64×64→128, 56²: 104 µs, 81 by its operations)
LOOP_US = 3.0  # of a kernel more
SHORTEST_US = 28.0  # on tensor cores: two or three launches, which the host has to send, too


def prefers_direct(of: Geometry, sizes: Mapping[str, int], sms: int = 132) -> bool:
    """Whether plain sums are expected to be faster than tensor cores."""
    direct, window = direct_us(of, sizes, sms), window_us(by_eight(of), 1, sizes, sms)
    if direct is None or window is None or of.channels < FEWEST_CHANNELS:
        return direct is not None
    return direct < window


def our_us(
    of: Geometry, walked: Geometry, sizes: Mapping[str, int], sms: int, row_by_row: bool
) -> float | None:
    """The time that the best of our kernels is expected to take; tensor cores have it as `walked`,
    plain sums read row by row."""
    on_cores = (window_us(walked, 1, sizes, sms), line_us(walked, sizes, sms))
    ways = [max(SHORTEST_US, each) for each in on_cores if each is not None]
    direct = direct_us(of, sizes, sms) if row_by_row else None
    return min(ways if direct is None else [*ways, direct], default=None)


def prefers_computed(
    of: Geometry,
    walked: Geometry,
    sizes: Mapping[str, int],
    read: int,
    alone: bool = True,
    sms: int = 132,
) -> bool:
    """Whether to compute the source while it is laid out as lines is expected to be faster than a
    loop before the convolution that reads so many bytes. What makes nothing but the source,
    `alone`, is no loop then; others read all the same, and write less."""
    lines = line_us(walked, sizes, sms)
    if lines is None or not is_small(walked) or of.channels < FEW_CHANNELS:
        return False  # of few channels the library rounds nothing, and there are no lines
    written = 4 * of.source_elements(sizes)
    loop = LOOP_US + (read + written) / LOOP_BYTES_PER_US
    ways = (direct_us(of, sizes, sms), beside_lines_us(walked, sizes, sms), lines)
    apart = min(each for each in ways if each is not None) + loop
    left = 0.0 if alone else LOOP_US + read / LOOP_BYTES_PER_US
    return lines + (read - written) / BYTES_PER_US + left < apart


def prefers_shared(of: Geometry, back: Geometry, sizes: Mapping[str, int], sms: int = 132) -> bool:
    """Whether both gradients of a convolution are expected to be faster where they read the same
    lines, which the one by the source, `back`, lays out."""
    apart = _back_us(back, sizes, sms) + gradient_us(of, of.x.result, sizes)
    return _shared_us(of, back, sizes, sms) < SHARED_GAIN * apart


def gradient_pays(of: Geometry, sizes: Mapping[str, int], beside: bool, sms: int = 132) -> bool:
    """Whether the gradient by the weights is ours rather than the library's; `beside` it the one by
    the source may be, with which it shares lines."""
    if gradient_is_worthwhile(of, sizes):
        return True
    back = of.turned_back
    ours = beside and is_worthwhile(back, sizes, sms=sms)
    if not ours or not prefers_shared(of, back, sizes, sms):
        return False
    library = library_gradient_us(of, sizes) * (STRIDED_LIBRARY if of.strided else 1.0)
    return _shared_us(of, back, sizes, sms) < GAIN * (_back_us(back, sizes, sms) + library)


def _shared_us(of: Geometry, back: Geometry, sizes: Mapping[str, int], sms: int) -> float:
    """Of both gradients that share lines; infinite where they cannot."""
    by_weights, shared = with_shared_lines(of, back)
    walks = {shared, by_eight(shared)}  # the first if it reduces its results
    whole = all(best_band(each) == each.x.positions for each in (by_weights, *walks))
    small = all(is_small(each) for each in (by_weights, *walks))
    few = min(of.channels, of.results) < FEW_CHANNELS  # of which the library rounds nothing
    if few or not whole or not small:
        return inf
    needed = [line_us(each, sizes, sms) for each in walks]
    needed.append(line_gradient_us(by_weights, sizes, sms))
    *lines, by_lines = (inf if each is None else each for each in needed)
    return max(lines) + by_lines


def _back_us(back: Geometry, sizes: Mapping[str, int], sms: int) -> float:
    """Of the gradient by the source, alone."""
    walked = by_eight(back)
    ways = beside_lines_us(walked, sizes, sms), line_us(walked, sizes, sms)
    return min((each for each in ways if each is not None), default=inf)


def is_worthwhile(
    of: Geometry,
    sizes: Mapping[str, int],
    row_by_row: bool = False,
    turned: bool = False,
    sms: int = 132,
) -> bool:
    """Whether a convolution of this size is ours rather than the library's; `turned` is as in
    `library_us`."""
    if of.channels < FEWEST_CHANNELS and not (row_by_row and prefers_direct(of, sizes, sms)):
        return False
    if of.transposed and of.strided and of.results < FEWEST_GATHERED and not is_plane(of):
        return False
    ours = our_us(of, by_eight(of), sizes, sms, row_by_row)
    return ours is not None and ours <= GAIN * library_us(of, sizes, turned)
