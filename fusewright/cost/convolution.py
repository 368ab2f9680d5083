"""Which kernel a convolution gets, and whether ours is faster than PyTorch's."""

from __future__ import annotations

from math import inf

from fusewright.cost import conv_staged as staged
from fusewright.cost import conv_tensor_core as tensor_core
from fusewright.cost.conv_direct import direct_us, is_depthwise
from fusewright.cost.conv_staged import is_small, staged_us
from fusewright.cost.conv_tensor_core import FEW_CHANNELS, FEWEST_CHANNELS, tensor_core_us
from fusewright.ir.convolution import Geometry, by_eight
from fusewright.ir.graph import Sizes
from fusewright.target.target import Target

GAIN = 0.95
SHARED_GAIN = 0.9  # for two more kernels (H200, 64 images: 256 and 334 µs before, 263 and 337 then)
STRIDED_PYTORCH = 1.25  # times as long (H200, 3×3 of 64×64→128, 56²: 104 µs, 81 by its operations)
LOOP_US = 3.0  # the launch of one more kernel
SHORTEST_US = 28.0  # on tensor cores: the host has to send two or three launches


def prefers_direct(of: Geometry, sizes: Sizes, target: Target) -> bool:
    """Whether a direct convolution is expected to be faster than tensor cores."""
    direct, cores = direct_us(of, sizes, target), tensor_core_us(by_eight(of), 1, sizes, target)
    if direct is None or cores is None or of.channels < FEWEST_CHANNELS:
        return direct is not None
    return direct < cores


def our_us(
    of: Geometry, walked: Geometry, sizes: Sizes, target: Target, row_by_row: bool
) -> float | None:
    """The expected time of the fastest of our kernels. Tensor cores compute it as `walked`; a
    direct convolution needs contiguous rows."""
    on_tensor_cores = (tensor_core_us(walked, 1, sizes, target), staged_us(walked, sizes, target))
    ways = [max(SHORTEST_US, each) for each in on_tensor_cores if each is not None]
    direct = direct_us(of, sizes, target) if row_by_row else None
    return min(ways if direct is None else [*ways, direct], default=None)


def prefers_computed(
    of: Geometry, walked: Geometry, sizes: Sizes, target: Target, read: int, alone: bool = True
) -> bool:
    """Whether a prologue of the staging is expected to be faster than a loop before the convolution
    that reads so many bytes. `alone`: whether that loop computes nothing else. If it does, it
    stays, reads the same and writes less."""
    staging = staged_us(walked, sizes, target)
    if staging is None or not is_small(walked) or of.channels < FEW_CHANNELS:
        return False  # With few channels PyTorch does not round, so nothing is staged.
    written = 4 * of.source_elements(sizes)
    memory = target.facts.relative_memory
    loop_rate, staged_rate = tensor_core.LOOP_BYTES_PER_US * memory, staged.BYTES_PER_US * memory
    loop = LOOP_US + (read + written) / loop_rate
    beside = tensor_core.beside_staging_us(walked, sizes, target)
    ways = (direct_us(of, sizes, target), beside, staging)
    separate = min(each for each in ways if each is not None) + loop
    left = 0.0 if alone else LOOP_US + read / loop_rate
    return staging + (read - written) / staged_rate + left < separate


def prefers_shared(of: Geometry, back: Geometry, sizes: Sizes, target: Target) -> bool:
    """Whether both gradients of a convolution are expected to be faster if they share the staged
    input that the input's gradient, `back`, writes."""
    by_weights = tensor_core.gradient_us(of, of.x.result, sizes, target)
    separate = _back_us(back, sizes, target) + by_weights
    return _shared_us(of, back, sizes, target) < SHARED_GAIN * separate


def gradient_pays(of: Geometry, sizes: Sizes, target: Target, beside: bool) -> bool:
    """Whether our weight gradient is faster than PyTorch's. `beside`: whether the input's gradient
    is computed, too, and may share its staged input."""
    if tensor_core.gradient_is_worthwhile(of, sizes, target):
        return True
    back = of.input_gradient
    ours = beside and is_worthwhile(back, sizes, target)
    if not ours or not prefers_shared(of, back, sizes, target):
        return False
    theirs = tensor_core.pytorch_gradient_us(of, sizes, target)
    theirs *= STRIDED_PYTORCH if of.strided else 1.0
    return _shared_us(of, back, sizes, target) < GAIN * (_back_us(back, sizes, target) + theirs)


def _shared_us(of: Geometry, back: Geometry, sizes: Sizes, target: Target) -> float:
    """The time of both gradients with a shared staged input. Infinite if they cannot share it."""
    by_weights, shared = staged.with_shared_staging(of, back)
    walks = {shared, by_eight(shared)}  # the first if it reduces its results
    whole = all(tensor_core.best_band(each) == each.x.positions for each in (by_weights, *walks))
    small = all(is_small(each) for each in (by_weights, *walks))
    few = min(of.channels, of.results) < FEW_CHANNELS  # PyTorch does not round these.
    if few or not whole or not small:
        return inf
    needed = [staged_us(each, sizes, target) for each in walks]
    needed.append(staged.staged_gradient_us(by_weights, sizes, target))
    *inputs, weights = (inf if each is None else each for each in needed)
    return max(inputs) + weights


def _back_us(back: Geometry, sizes: Sizes, target: Target) -> float:
    """The time of the input's gradient, alone."""
    walked = by_eight(back)
    beside = tensor_core.beside_staging_us(walked, sizes, target)
    ways = beside, staged_us(walked, sizes, target)
    return min((each for each in ways if each is not None), default=inf)


def is_worthwhile(
    of: Geometry,
    sizes: Sizes,
    target: Target,
    row_by_row: bool = False,
    channels_last: bool = False,
) -> bool:
    """Whether our convolution is faster than PyTorch's. `channels_last` is that of `pytorch_us`."""
    if of.channels < FEWEST_CHANNELS and not (row_by_row and prefers_direct(of, sizes, target)):
        return False
    gathered = of.transposed and of.strided and not is_depthwise(of)
    if gathered and of.results < tensor_core.FEWEST_GATHERED:
        return False
    theirs = tensor_core.pytorch_us(of, sizes, target, channels_last)
    ours = our_us(of, by_eight(of), sizes, target, row_by_row)
    return ours is not None and ours <= GAIN * theirs
