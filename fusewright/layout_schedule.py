"""How products and convolutions are laid out: the choices that there are, and the heuristic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusewright.direct_cost import DirectSchedule, best_tile, fits
from fusewright.ending import Reduces
from fusewright.ir import ONE
from fusewright.product import ProductKernel
from fusewright.product_cost import best_tile_rows
from fusewright.schedule import Target
from fusewright.window import GradientKernel, WindowKernel
from fusewright.window_cost import (
    best_band,
    best_tile_channels,
    gradient_parts,
    has_turns,
    prefers_direct,
)


@dataclass(frozen=True)
class ProductSchedule:
    """How a product is laid out: a block computes tiles of TILE_COLUMNS × `tile_rows`."""

    tile_rows: int


def choose_product(
    kernel: ProductKernel, target: Target, sizes: Mapping[str, int]
) -> ProductSchedule:
    """The heuristic's choice of a tile."""
    return ProductSchedule(best_tile_rows(kernel.extents(sizes), target.sms, kernel.a.dtype))


@dataclass(frozen=True)
class WindowSchedule:
    """How a convolution is laid out: tiles of `tile_channels` results, bands of `band_width`.

    With `turns` a tile has all results, 64 at a time, unless products are to be exact in fp32.
    """

    tile_channels: int
    band_width: int
    turns: bool = False


def choose_window(
    kernel: WindowKernel, target: Target, sizes: Mapping[str, int]
) -> WindowSchedule | DirectSchedule:
    """The heuristic's choice: on tensor cores, by tile and bands, or as plain sums."""
    of = kernel.geometry
    if may_be_direct(kernel) and prefers_direct(of, sizes, target.sms):
        return best_tile(of)
    band = best_band(of)
    assert band is not None, "rewriting asks for room first"
    return WindowSchedule(best_tile_channels(of), band, has_turns(of, band))


def may_be_direct(kernel: WindowKernel, tile: DirectSchedule | None = None) -> bool:
    """Whether it can be plain sums: those have rows as they lie in memory, and reduce nothing."""
    row_by_row = kernel.source.strides[-1] == ONE
    return row_by_row and kernel.reduces is Reduces.NOTHING and fits(kernel.geometry, tile)


@dataclass(frozen=True)
class GradientSchedule:
    """How a convolution's gradient by its weights is divided: `parts` of the positions, summed
    apart and added in order."""

    parts: int
    band_width: int


def choose_gradient(
    kernel: GradientKernel, target: Target, sizes: Mapping[str, int]
) -> GradientSchedule:
    """The heuristic's choice: work for all processors to the end."""
    band = best_band(kernel.geometry)
    assert band is not None, "rewriting asks for room first"
    return GradientSchedule(gradient_parts(kernel.geometry, band, sizes, target.sms), band)


EndedSchedule = ProductSchedule | WindowSchedule | DirectSchedule
