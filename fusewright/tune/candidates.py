"""Schedules worth measuring for one kernel: the heuristic's own first, then what lies around it.

All of them are legal. There are few, because each one is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusewright.cost.conv_direct import (
    ACROSS,
    MOST_PARTS,
    OUTS,
    ROWS,
    DirectSchedule,
    has_plane_gradient,
)
from fusewright.cost.conv_staged import LINE_POSITIONS, line_fits
from fusewright.cost.conv_tensor_core import TILE_CHANNELS, band_widths, fits, has_turns
from fusewright.cost.matmul import tiles_for
from fusewright.ir.convolution import Geometry, WindowKernel
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import ProductKernel, SplitOperand
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.plan.equal_kernels import Kernel
from fusewright.schedule.choice import LARGE_TILE, Schedule
from fusewright.schedule.coalesce import coalesce
from fusewright.schedule.loops import SMALL_TILE, candidates, choose, legal
from fusewright.schedule.tensor_core import (
    GradientSchedule,
    ProductSchedule,
    WindowSchedule,
    choose_gradient,
    choose_product,
    choose_window,
    may_be_direct,
)
from fusewright.schedule.vector_width import widths
from fusewright.target.target import Target

Choice = Schedule | ProductSchedule | WindowSchedule | DirectSchedule | GradientSchedule
Sizes = Mapping[str, int]

MOST = 12
MOST_PROPOSALS = 4  # of those that the heuristic itself would try next
MOST_UNROLL = 16
MOST_SPLITS = 4096
PASS_VECTORS = 4  # vectors in flight where a row that was cached is read again instead


def heuristic(kernel: Kernel, target: Target, sizes: Sizes) -> Choice:
    """What is taken where nothing was measured."""
    if isinstance(kernel, ProductKernel):
        return choose_product(kernel, target, sizes)
    if isinstance(kernel, WindowKernel):
        return choose_window(kernel, target, sizes)
    if isinstance(kernel, GradientKernel):
        return choose_gradient(kernel, target, sizes)
    return choose(kernel, target, sizes)


def permitted(kernel: Kernel, choice: Choice, target: Target) -> bool:
    """Whether the choice is one for this kind of kernel, and legal for this one."""
    if isinstance(kernel, ProductKernel):
        if not isinstance(choice, ProductSchedule):
            return False
        if choice.rounded_from < 0 or choice.shared_tiles < 0:
            return False
        splits = isinstance(kernel.b, SplitOperand)
        return choice.tile_rows in tiles_for(kernel.a.dtype) and (splits or not choice.rounded_from)
    if isinstance(kernel, WindowKernel) and isinstance(choice, DirectSchedule):
        tile = (choice.outs in OUTS, choice.across in ACROSS)
        plane = (choice.outs == 1, choice.across == 0)
        known = choice.rows in ROWS and (all(tile) or all(plane))
        of, positions = kernel.walked, choice.line_positions
        lines = not positions or _band_fits(of, of.x.result)
        return (
            known
            and lines
            and _lines_fit(of, of.x.result, positions)
            and may_be_direct(kernel, choice)
        )
    if isinstance(kernel, WindowKernel):
        if not isinstance(choice, WindowSchedule) or choice.tile_channels not in TILE_CHANNELS:
            return False
        of, band = kernel.walked, choice.band_width
        if choice.turns and (choice.line_positions or not has_turns(of, band)):
            return False
        if kernel.lines and not (choice.line_positions and band == of.x.positions):
            return False
        return _lines_fit(of, band, choice.line_positions) and _band_fits(of, band)
    if isinstance(kernel, GradientKernel):
        if not isinstance(choice, GradientSchedule) or choice.parts < 1:
            return False
        if has_plane_gradient(kernel.geometry):
            return choice.band_width == 0 and choice.parts <= MOST_PARTS
        if kernel.back is not None:
            return choice.band_width == kernel.geometry.x.result
        return _band_fits(kernel.geometry, choice.band_width)
    return isinstance(choice, Schedule) and legal(kernel, choice, target)


def _lines_fit(of: Geometry, band_width: int, positions: int) -> bool:
    return not positions or (positions in LINE_POSITIONS and line_fits(of, band_width, positions))


def _band_fits(of: Geometry, band_width: int) -> bool:
    return band_width in band_widths(of) and fits(of, band_width)


def worth_trying(kernel: Kernel, target: Target, sizes: Sizes) -> tuple[Choice, ...]:
    """At most MOST legal choices, the heuristic's first."""
    first = heuristic(kernel, target, sizes)
    wanted = dict.fromkeys((first, *_others(kernel, first, target, sizes)))
    return tuple(each for each in wanted if permitted(kernel, each, target))[:MOST]


def _others(kernel: Kernel, first: Choice, target: Target, sizes: Sizes) -> Iterator[Choice]:
    if isinstance(kernel, ProductKernel):
        assert isinstance(first, ProductSchedule)
        yield from (replace(first, tile_rows=rows) for rows in tiles_for(kernel.a.dtype))
        return
    if isinstance(kernel, WindowKernel):
        if isinstance(first, DirectSchedule):
            yield from (replace(first, line_positions=each) for each in (0, *LINE_POSITIONS))
            yield from (replace(first, rows=each) for each in ROWS)
            yield from (replace(first, outs=each) for each in OUTS)
            return
        assert isinstance(first, WindowSchedule)
        if kernel.needs_lines:  # which trials, in float32's precision, do not go by
            return
        by_tiles = replace(first, turns=False, line_positions=0)
        yield replace(by_tiles, turns=True)
        yield from (replace(by_tiles, line_positions=each) for each in LINE_POSITIONS)
        yield from (replace(by_tiles, tile_channels=each) for each in TILE_CHANNELS)
        yield from (replace(first, band_width=each) for each in band_widths(kernel.walked))
        return
    if isinstance(kernel, GradientKernel):
        assert isinstance(first, GradientSchedule)
        if kernel.back is not None:  # likewise
            return
        yield from (replace(first, parts=max(1, first.parts * each // 4)) for each in (2, 3, 8))
        return
    assert isinstance(first, Schedule)
    small = coalesce(kernel)
    proposed = (each for each in candidates(small, target, sizes) if legal(small, each, target))
    yield from list(proposed)[:MOST_PROPOSALS]
    around = _around_on_host if target.language == "host" else _around
    yield from around(small, first, sizes)


def _around(kernel: LoopKernel, first: Schedule, sizes: Sizes) -> Iterator[Schedule]:
    """A few steps from `first` in each direction, on a GPU."""
    match first.kind:
        case "pointwise":
            variations = _pointwise(first)
        case "row" if first.cached:
            variations = _cached_rows(first, kernel.inner_numel.at(sizes))
        case "row":
            variations = _rows(first, kernel.inner_numel.at(sizes))
        case "column" if first.cached:
            variations = _held_columns(first, kernel.inner_numel.at(sizes))
        case "column":
            variations = _columns(first)
        case "scan":
            variations = _scans(first)
        case "scan_column":
            variations = _columns(first)
        case "transpose" | "transpose_row":
            variations = _tiles(first)
        case _:
            return
    whole = set(widths(kernel, first.kind))
    for each in variations:
        if each.lanes in whole and each.unroll <= MOST_UNROLL and each.splits <= MOST_SPLITS:
            yield each


def _pointwise(first: Schedule) -> Iterator[Schedule]:
    threads, unroll, lanes = first.threads, first.unroll, first.lanes
    for factor in (2, 4):
        yield replace(first, unroll=unroll * factor)
    yield replace(first, unroll=unroll // 2)
    for size in (threads // 2, threads * 2, threads * 4):
        yield replace(first, threads=size)
    for size in (threads // 2, threads * 2):
        yield replace(first, threads=size, unroll=unroll * 2)
    yield replace(first, lanes=lanes // 2)
    yield replace(first, lanes=lanes // 2, unroll=unroll * 2)
    yield replace(first, lanes=lanes * 2)


def _cached_rows(first: Schedule, inner: int) -> Iterator[Schedule]:
    """Other shares of a row for each thread, more rows in a block, or the row read again."""
    for threads in (first.threads // 2, first.threads * 2, first.threads // 4, first.threads * 4):
        yield _holding(first, threads, inner)
    for rows in (first.rows * 2, first.rows // 2):
        yield replace(first, rows=rows)
    yield _holding(replace(first, lanes=first.lanes // 2), first.threads, inner)
    for threads in (first.threads, first.threads * 2):
        again = replace(_with_threads(first, threads), unroll=PASS_VECTORS)
        yield replace(again, cached=False, beyond=0, shared=0)


def _rows(first: Schedule, inner: int) -> Iterator[Schedule]:
    for splits in (first.splits * 2, first.splits // 2, 1):
        yield replace(first, splits=splits)
    for unroll in (first.unroll * 2, first.unroll // 2):
        yield replace(first, unroll=unroll)
    for threads in (first.threads * 2, first.threads // 2):
        yield _with_threads(first, threads)
    yield replace(first, lanes=first.lanes // 2, unroll=first.unroll * 2)
    for threads in (first.threads, first.threads * 2, 1024):
        yield _holding(replace(first, splits=1, cached=True), threads, inner)


def _scans(first: Schedule) -> Iterator[Schedule]:
    for splits in (first.splits * 2, first.splits // 2, 1):
        yield replace(first, splits=splits)
    for threads in (first.threads * 2, first.threads // 2):
        yield _with_threads(first, threads)
        yield replace(_with_threads(first, threads), unroll=max(1, first.unroll // 2))
    for unroll in (first.unroll * 2, first.unroll // 2):
        yield replace(first, unroll=unroll)


def _columns(first: Schedule) -> Iterator[Schedule]:
    for splits in (first.splits * 2, first.splits // 2, 1):
        yield replace(first, splits=splits)
    for unroll in (first.unroll * 2, first.unroll // 2):
        yield replace(first, unroll=unroll)
    for threads in (first.threads * 2, first.threads // 2):
        yield replace(first, threads=threads)
    for across in (first.across // 2, first.across // 4):
        yield replace(first, across=across)
    for lanes in (first.lanes // 2, first.lanes * 2):
        yield replace(first, lanes=lanes)


def _held_columns(first: Schedule, inner: int) -> Iterator[Schedule]:
    """Other shares of a column for each thread, other threads of a block beside one another."""
    size, beside = first.threads, first.across
    shares = (2 * size, beside), (size, beside // 2), (4 * size, beside), (size, beside // 4)
    for threads, across in (*shares, (2 * size, beside // 2), (size // 2, beside)):
        down = max(1, threads // max(1, across))
        yield replace(first, threads=threads, across=across, unroll=max(1, -(-inner // down)))
    for lanes in (first.lanes // 2, first.lanes * 2):
        yield replace(first, lanes=lanes)


def _tiles(first: Schedule) -> Iterator[Schedule]:
    for tile in (SMALL_TILE, LARGE_TILE):
        yield replace(first, tile=tile)
        yield replace(first, tile=tile, threads=first.threads // 2)
        yield replace(first, tile=tile, threads=first.threads * 2)
    if first.kind == "transpose_row":
        for splits in (first.splits * 2, first.splits // 2):
            yield replace(first, splits=splits)
    yield replace(first, lanes=first.lanes // 2)


def _with_threads(schedule: Schedule, threads: int) -> Schedule:
    """Rows share a block where a warp or less has one; never less than a warp in a block."""
    rows = max(1, 128 // max(1, threads)) if threads <= 32 else 1
    return replace(schedule, threads=threads, rows=rows)


def _holding(schedule: Schedule, threads: int, inner: int) -> Schedule:
    """As many vectors for each thread as a row in registers takes."""
    unroll = max(1, -(-inner // max(1, threads * schedule.lanes)))
    return replace(_with_threads(schedule, threads), unroll=unroll, beyond=0, shared=0)


def _around_on_host(_: LoopKernel, first: Schedule, sizes: Sizes) -> Iterator[Schedule]:
    """A pointwise loop has nothing to choose on the host."""
    if first.kind not in ("row", "column"):
        return
    for splits in (first.splits * 2, first.splits // 2, first.splits * 4, 1):
        yield replace(first, splits=splits)
    factors = (2, 4) if first.kind == "row" else (4, 16)
    for factor in factors:
        yield replace(first, lanes=first.lanes // factor)
        yield replace(first, lanes=first.lanes * factor)
