"""The record of convolutions: on tensor cores, or direct."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusewright.codegen.convolution import convolution_workspace, render_convolution
from fusewright.cost import conv_tensor_core as tensor_core
from fusewright.cost.conv_direct import ACROSS, OUTS, ROWS, DirectSchedule
from fusewright.cost.conv_staged import STAGED_POSITIONS, staged_fits, staged_spec
from fusewright.cost.conv_tensor_core import TILE_CHANNELS, band_widths
from fusewright.cost.convolution import our_us
from fusewright.ir.convolution import ConvFilter, ConvolutionKernel, ConvSource, Geometry
from fusewright.ir.graph import ONE, Dim, Sizes
from fusewright.ir.loop import LoopKernel
from fusewright.kinds.kind import Kind
from fusewright.kinds.loop import largest, loop_elements, walked
from fusewright.schedule.tensor_core import ConvolutionSchedule, choose_convolution, may_be_direct
from fusewright.target.target import Target

Way = ConvolutionSchedule | DirectSchedule


def _permits(kernel: ConvolutionKernel, choice: Way, target: Target) -> bool:
    of, positions = kernel.walked, choice.staged_positions
    if isinstance(choice, DirectSchedule):
        tile = (choice.outs in OUTS, choice.across in ACROSS)
        plane = (choice.outs == 1, choice.across == 0)
        known = choice.rows in ROWS and (all(tile) or all(plane))
        staged = not positions or band_fits(of, of.x.result)
        fit = known and staged and _staging_fits(of, of.x.result, positions)
        return fit and may_be_direct(kernel, choice)
    band = choice.band_width
    if choice.tile_channels not in TILE_CHANNELS:
        return False
    if choice.ping_pong and (positions or not tensor_core.has_ping_pong(of, band)):
        return False
    if kernel.staged and not (positions and band == of.x.positions):
        return False
    return _staging_fits(of, band, positions) and band_fits(of, band)


def band_fits(of: Geometry, band_width: int) -> bool:
    return band_width in band_widths(of) and tensor_core.fits(of, band_width)


def _staging_fits(of: Geometry, band_width: int, positions: int) -> bool:
    known = positions in STAGED_POSITIONS
    return not positions or (known and staged_fits(of, band_width, positions))


def _variations(
    kernel: ConvolutionKernel, first: Way, target: Target, sizes: Sizes
) -> Iterator[Way]:
    if isinstance(first, DirectSchedule):
        yield from (replace(first, staged_positions=each) for each in (0, *STAGED_POSITIONS))
        yield from (replace(first, rows=each) for each in ROWS)
        yield from (replace(first, outs=each) for each in OUTS)
        return
    if kernel.needs_staging:  # Trials run in float32's precision, which stages no input.
        return
    by_tiles = replace(first, ping_pong=False, staged_positions=0)
    yield replace(by_tiles, ping_pong=True)
    yield from (replace(by_tiles, staged_positions=each) for each in STAGED_POSITIONS)
    yield from (replace(by_tiles, tile_channels=each) for each in TILE_CHANNELS)
    yield from (replace(first, band_width=each) for each in band_widths(kernel.walked))


def image_elements(
    images: ConvSource, counts: Iterable[int], prologue: LoopKernel | None, sizes: Sizes
) -> Iterator[tuple[str, int]]:
    """How many elements are read of the images, or of the inputs of their prologue."""
    if prologue is None:
        yield images.buffer, walked(counts, images.strides, sizes)
        return
    reached = loop_elements(prologue, sizes)
    given = (each.name for each in prologue.arguments if not each.is_output)
    yield from ((name, reached[name]) for name in given)


def source_counts(of: Geometry, sizes: Sizes) -> tuple[int, ...]:
    """The sizes of a convolution's input."""
    return of.images.at(sizes), of.groups * of.channels, *(axis.size for axis in of.axes)


def filter_elements(of: Geometry, weights: ConvFilter) -> tuple[str, int]:
    counts = (of.groups, of.results, of.channels, *(axis.taps for axis in of.axes))
    return weights.buffer, walked(counts, tuple(map(Dim, weights.strides)), {})


def _elements(kernel: ConvolutionKernel, sizes: Sizes) -> dict[str, int]:
    counts = source_counts(kernel.geometry, sizes)
    found = largest(
        *loop_elements(kernel.epilogue, sizes).items(),
        *image_elements(kernel.source, counts, kernel.prologue, sizes),
        filter_elements(kernel.geometry, kernel.filter),
    )
    if kernel.staged:
        found[kernel.staged] = staged_spec(kernel.walked, "").numel.at(sizes)
    return found


def _times_us(kernel: ConvolutionKernel, target: Target, sizes: Sizes) -> tuple[float, float]:
    row_by_row, of = kernel.source.strides[-1] == ONE and kernel.prologue is None, kernel.geometry
    ours = our_us(of, kernel.walked, sizes, target, row_by_row)
    assert ours is not None, f"the rewrite should have checked that it fits: {of}"
    return ours, tensor_core.pytorch_us(of, sizes, target)


CONVOLUTION = Kind(
    kernel=ConvolutionKernel,
    words="convolution kernel",
    schedules={"convolution": ConvolutionSchedule, "direct_convolution": DirectSchedule},
    choose=choose_convolution,
    permits=_permits,
    variations=_variations,
    workspace=lambda kernel, choice, target: convolution_workspace(kernel, choice),
    render=lambda kernel, choice, target: render_convolution(kernel, choice),
    elements=_elements,
    summands=lambda kernel, sizes: kernel.geometry.channels * kernel.geometry.taps,
    times_us=_times_us,
)
