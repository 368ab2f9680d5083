"""Schedules of matmuls and convolutions: the choices, and the heuristic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusewright.cost.conv_direct import (
    DirectSchedule,
    best_tile,
    depthwise_gradient_parts,
    direct_us,
    fits,
    has_depthwise_gradient,
)
from fusewright.cost.conv_staged import best_staged, prefers_staging
from fusewright.cost.conv_tensor_core import (
    beside_staging_us,
    best_band,
    best_tile_channels,
    gradient_work,
    has_ping_pong,
)
from fusewright.cost.convolution import prefers_direct
from fusewright.cost.matmul import best_tile_rows, parts_of, rounded_from
from fusewright.ir.convolution import ConvolutionKernel
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import ONE
from fusewright.ir.matmul import MatmulKernel, SplitOperand
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.target.target import Target


@dataclass(frozen=True)
class MatmulSchedule:
    """How a matmul is mapped: a block computes tiles of TILE_COLUMNS × `tile_rows`.

    With TF32's precision and at least `rounded_from` rows, if that is not 0, `a` is rounded to
    float16 first. If there are few tiles, blocks share them, and the workspace has room for the
    partial results of `shared_tiles` tiles.
    """

    tile_rows: int
    rounded_from: int = 0
    shared_tiles: int = 0


def choose_matmul(kernel: MatmulKernel, target: Target, sizes: Mapping[str, int]) -> MatmulSchedule:
    """The heuristic's choice of a tile, and the number of rows from which rounding first pays."""
    of = kernel.extents(sizes)
    tile_rows = best_tile_rows(of, target, kernel.a.dtype)
    if not isinstance(kernel.b, SplitOperand):
        return MatmulSchedule(tile_rows)
    free_major, together = kernel.a.free_stride == ONE, kernel.shares_rounding
    least, rows = rounded_from(of, tile_rows, free_major, together, target), kernel.rounded_rows
    never = rows.is_static and rows.at({}) < least
    shared = target.sms if parts_of(of, tile_rows, target) > 1 else 0
    return MatmulSchedule(tile_rows, 0 if never else least, shared)


@dataclass(frozen=True)
class ConvolutionSchedule:
    """How a convolution is mapped: tiles of `tile_channels` output channels, bands of `band_width`.

    If results need not be exact in fp32: with `ping_pong` a tile has all of them, 64 at a time;
    with `staged_positions` the input is staged as fp16 first, for tiles of so many positions.
    """

    tile_channels: int
    band_width: int
    ping_pong: bool = False
    staged_positions: int = 0


def choose_convolution(
    kernel: ConvolutionKernel, target: Target, sizes: Mapping[str, int]
) -> ConvolutionSchedule | DirectSchedule:
    """The heuristic's choice: on tensor cores, with tiles and bands, or as plain sums."""
    of, whole = kernel.walked, kernel.geometry
    band = best_band(of)
    if may_be_direct(kernel) and prefers_direct(whole, sizes, target):
        by_staging = prefers_staging(of, direct_us(whole, sizes, target), sizes, target)
        by_staging &= band == of.x.result
        positions = best_staged(of, of.x.result, sizes, target) if by_staging else 0
        return replace(best_tile(whole, sizes, target), staged_positions=positions)
    assert band is not None, "rewriting checks that a band fits"
    others_us = beside_staging_us(of, sizes, target)
    if kernel.needs_staging or prefers_staging(of, others_us, sizes, target):
        positions = best_staged(of, band, sizes, target)
        return ConvolutionSchedule(best_tile_channels(of), band, staged_positions=positions)
    return ConvolutionSchedule(best_tile_channels(of), band, has_ping_pong(of, band))


def may_be_direct(kernel: ConvolutionKernel, tile: DirectSchedule | None = None) -> bool:
    """Whether plain sums can compute it: they need contiguous rows, and they reduce nothing."""
    row_by_row = kernel.source.strides[-1] == ONE and not kernel.needs_staging
    return row_by_row and kernel.reduces is Reduces.NOTHING and fits(kernel.geometry, tile)


@dataclass(frozen=True)
class GradientSchedule:
    """How a weight gradient is divided: `parts` of the positions are summed separately and added in
    order; without bands, plane by plane."""

    parts: int
    band_width: int


def choose_gradient(
    kernel: GradientKernel, target: Target, sizes: Mapping[str, int]
) -> GradientSchedule:
    """The heuristic's choice: keep all processors busy to the end."""
    of = kernel.geometry
    if has_depthwise_gradient(of):
        return GradientSchedule(depthwise_gradient_parts(of, sizes, target), 0)
    if kernel.back is not None:
        walked, band = of.as_staged, of.x.result
    else:
        found = best_band(of)
        assert found is not None, "rewriting checks that a band fits"
        walked, band = of, found
    return GradientSchedule(gradient_work(walked, band, sizes).parts(target), band)
