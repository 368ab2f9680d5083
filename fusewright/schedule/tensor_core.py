"""How products and convolutions are laid out: the choices that there are, and the heuristic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusewright.cost.conv_direct import (
    DirectSchedule,
    best_tile,
    direct_us,
    fits,
    has_plane_gradient,
    plane_gradient_parts,
)
from fusewright.cost.conv_staged import best_line, prefers_lines
from fusewright.cost.conv_tensor_core import (
    beside_lines_us,
    best_band,
    best_tile_channels,
    gradient_work,
    has_turns,
)
from fusewright.cost.convolution import prefers_direct
from fusewright.cost.matmul import best_tile_rows, parts_of, rounded_from
from fusewright.ir.convolution import WindowKernel
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import ONE
from fusewright.ir.matmul import ProductKernel, SplitOperand
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.target.target import Target


@dataclass(frozen=True)
class ProductSchedule:
    """How a product is laid out: a block computes tiles of TILE_COLUMNS × `tile_rows`.

    With TF32's precision and at least `rounded_from` rows its `a` is rounded to halves first, if
    that is not 0. Where tiles are few, blocks share them, and there is room for the parts of
    `shared_tiles` in all.
    """

    tile_rows: int
    rounded_from: int = 0
    shared_tiles: int = 0


def choose_product(
    kernel: ProductKernel, target: Target, sizes: Mapping[str, int]
) -> ProductSchedule:
    """The heuristic's choice of a tile, and from how many rows on it pays to round first."""
    of = kernel.extents(sizes)
    tile_rows = best_tile_rows(of, target.sms, kernel.a.dtype)
    if not isinstance(kernel.b, SplitOperand):
        return ProductSchedule(tile_rows)
    free_major, together = kernel.a.free_stride == ONE, kernel.shares_rounding
    least, rows = rounded_from(of, tile_rows, free_major, together), kernel.rounded_rows
    never = rows.is_static and rows.at({}) < least
    shared = target.sms if parts_of(of, tile_rows, target.sms) > 1 else 0
    return ProductSchedule(tile_rows, 0 if never else least, shared)


@dataclass(frozen=True)
class WindowSchedule:
    """How a convolution is laid out: tiles of `tile_channels` results, bands of `band_width`.

    Where results need not be exact in fp32: with `turns` a tile has all of them, 64 at a time, and
    with `line_positions` the source is laid out as halves first, for tiles of so many positions.
    """

    tile_channels: int
    band_width: int
    turns: bool = False
    line_positions: int = 0


def choose_window(
    kernel: WindowKernel, target: Target, sizes: Mapping[str, int]
) -> WindowSchedule | DirectSchedule:
    """The heuristic's choice: on tensor cores, by tile and bands, or as plain sums."""
    of, whole = kernel.walked, kernel.geometry
    band, sms = best_band(of), target.sms
    if may_be_direct(kernel) and prefers_direct(whole, sizes, sms):
        by_lines = prefers_lines(of, direct_us(whole, sizes, sms), sizes, sms)
        by_lines &= band == of.x.result
        lines = best_line(of, of.x.result, sizes, sms) if by_lines else 0
        return replace(best_tile(whole, sizes, sms), line_positions=lines)
    assert band is not None, "rewriting asks for room first"
    if kernel.needs_lines or prefers_lines(of, beside_lines_us(of, sizes, sms), sizes, sms):
        lines = best_line(of, band, sizes, sms)
        return WindowSchedule(best_tile_channels(of), band, line_positions=lines)
    return WindowSchedule(best_tile_channels(of), band, has_turns(of, band))


def may_be_direct(kernel: WindowKernel, tile: DirectSchedule | None = None) -> bool:
    """Whether it can be plain sums: those have rows as they lie in memory, and reduce nothing."""
    row_by_row = kernel.source.strides[-1] == ONE and not kernel.needs_lines
    return row_by_row and kernel.reduces is Reduces.NOTHING and fits(kernel.geometry, tile)


@dataclass(frozen=True)
class GradientSchedule:
    """How a convolution's gradient by its weights is divided: `parts` of the positions, summed
    apart and added in order; without bands plane by plane."""

    parts: int
    band_width: int


def choose_gradient(
    kernel: GradientKernel, target: Target, sizes: Mapping[str, int]
) -> GradientSchedule:
    """The heuristic's choice: work for all processors to the end."""
    of = kernel.geometry
    if has_plane_gradient(of):
        return GradientSchedule(plane_gradient_parts(of, sizes, target.sms), 0)
    if kernel.back is not None:
        walked, band = of.in_lines, of.x.result
    else:
        found = best_band(of)
        assert found is not None, "rewriting asks for room first"
        walked, band = of, found
    return GradientSchedule(gradient_work(walked, band, sizes).parts(target.sms), band)


EndedSchedule = ProductSchedule | WindowSchedule | DirectSchedule
