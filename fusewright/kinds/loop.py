"""The record of loops, with variations of the heuristic's schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fusewright.codegen.loop import render_loop
from fusewright.codegen.source import Workspace
from fusewright.ir.graph import Dim, Sizes
from fusewright.ir.loop import Access, Load, LoopKernel, Reduce, Scan, Store
from fusewright.kinds.kind import Kind
from fusewright.schedule.choice import LARGE_TILE, Schedule
from fusewright.schedule.coalesce import coalesce
from fusewright.schedule.loops import SMALL_TILE, candidates, choose, legal, workspace_bytes
from fusewright.schedule.vector_width import widths
from fusewright.target.target import Target

MOST_PROPOSALS = 4  # of the heuristic's own next candidates
MOST_UNROLL = 16
MOST_SPLITS = 4096
PASS_VECTORS = 4  # vectors in flight if a row is read again instead of cached


def loop_elements(kernel: LoopKernel, sizes: Sizes) -> dict[str, int]:
    """How many elements of each buffer a loop may access."""
    found = {each.name: 1 for each in kernel.arguments}
    for item in kernel.body:
        if isinstance(item, Load | Store):
            name = item.access.buffer
            found[name] = max(found.get(name, 1), _reach(kernel, item.access, sizes))
    return found


def _reach(kernel: LoopKernel, access: Access, sizes: Sizes) -> int:
    moves = zip(kernel.axes, access.strides, strict=True)
    furthest = sum(max(0, (axis.size.at(sizes) - 1) * step.at(sizes)) for axis, step in moves)
    return 1 + furthest + sum(each.at(sizes) for each in access.offset)


def largest(*counts: tuple[str, int]) -> dict[str, int]:
    """The largest count of each buffer, which may be read in several ways."""
    found: dict[str, int] = {}
    for name, count in counts:
        found[name] = max(count, found.get(name, 0))
    return found


def walked(counts: Iterable[int], strides: Sequence[Dim], sizes: Sizes) -> int:
    """How many elements of a buffer these counts and strides span."""
    moves = zip(counts, strides, strict=True)
    return 1 + sum((count - 1) * stride.at(sizes) for count, stride in moves)


def _summands(kernel: LoopKernel, sizes: Sizes) -> int:
    adds = any(isinstance(item, Reduce | Scan) for item in kernel.body)
    return max(1, kernel.inner_numel.at(sizes)) if adds else 0


def _variations(
    kernel: LoopKernel, first: Schedule, target: Target, sizes: Sizes
) -> Iterator[Schedule]:
    small = coalesce(kernel)
    proposed = (each for each in candidates(small, target, sizes) if legal(small, each, target))
    yield from list(proposed)[:MOST_PROPOSALS]
    around = _around_on_host if target.language == "host" else _around
    yield from around(small, first, sizes)


def _around(kernel: LoopKernel, first: Schedule, sizes: Sizes) -> Iterator[Schedule]:
    """Variations on a GPU: a few steps from `first` in each direction."""
    match first.kind:
        case "pointwise":
            variations = _pointwise(first)
        case "row" if first.cached:
            variations = _cached_rows(first, kernel.inner_numel.at(sizes))
        case "row":
            variations = _rows(first, kernel.inner_numel.at(sizes))
        case "column" | "transpose_column" if first.cached:
            variations = _held_columns(first, kernel.inner_numel.at(sizes))
        case "column" | "scan_column":
            variations = _columns(first)
        case "scan":
            variations = _scans(first)
        case "transpose" | "transpose_row":
            variations = _tiles(first)
        case _:
            return
    whole = set(widths(kernel, first.kind))
    for each in variations:
        if each.lanes in whole and each.unroll <= MOST_UNROLL and each.splits <= MOST_SPLITS:
            yield each


def _each(first: Schedule, field: str, *values: int) -> Iterator[Schedule]:
    """Schedules with each of these values in one field."""
    changes: Iterator[dict[str, Any]] = ({field: value} for value in values)
    return (replace(first, **change) for change in changes)


def _pointwise(first: Schedule) -> Iterator[Schedule]:
    threads, unroll, lanes = first.threads, first.unroll, first.lanes
    yield from _each(first, "unroll", unroll * 2, unroll * 4, unroll // 2)
    yield from _each(first, "threads", threads // 2, threads * 2, threads * 4)
    yield from _each(replace(first, unroll=unroll * 2), "threads", threads // 2, threads * 2)
    yield replace(first, lanes=lanes // 2)
    yield replace(first, lanes=lanes // 2, unroll=unroll * 2)
    yield replace(first, lanes=lanes * 2)


def _cached_rows(first: Schedule, inner: int) -> Iterator[Schedule]:
    """Another share of a row per thread, more rows in a block, or reading the row again."""
    for threads in (first.threads // 2, first.threads * 2, first.threads // 4, first.threads * 4):
        yield _holding(first, threads, inner)
    yield from _each(first, "rows", first.rows * 2, first.rows // 2)
    yield _holding(replace(first, lanes=first.lanes // 2), first.threads, inner)
    for threads in (first.threads, first.threads * 2):
        again = replace(_with_threads(first, threads), unroll=PASS_VECTORS)
        yield replace(again, cached=False, beyond=0, shared=0)


def _rows(first: Schedule, inner: int) -> Iterator[Schedule]:
    yield from _each(first, "splits", first.splits * 2, first.splits // 2, 1)
    yield from _each(first, "unroll", first.unroll * 2, first.unroll // 2)
    for threads in (first.threads * 2, first.threads // 2):
        yield _with_threads(first, threads)
    yield replace(first, lanes=first.lanes // 2, unroll=first.unroll * 2)
    for threads in (first.threads, first.threads * 2, 1024):
        yield _holding(replace(first, splits=1, cached=True), threads, inner)


def _scans(first: Schedule) -> Iterator[Schedule]:
    yield from _each(first, "splits", first.splits * 2, first.splits // 2, 1)
    for threads in (first.threads * 2, first.threads // 2):
        yield _with_threads(first, threads)
        yield replace(_with_threads(first, threads), unroll=max(1, first.unroll // 2))
    yield from _each(first, "unroll", first.unroll * 2, first.unroll // 2)


def _columns(first: Schedule) -> Iterator[Schedule]:
    yield from _each(first, "splits", first.splits * 2, first.splits // 2, 1)
    yield from _each(first, "unroll", first.unroll * 2, first.unroll // 2)
    yield from _each(first, "threads", first.threads * 2, first.threads // 2)
    yield from _each(first, "across", first.across // 2, first.across // 4)
    yield from _each(first, "lanes", first.lanes // 2, first.lanes * 2)


def _held_columns(first: Schedule, inner: int) -> Iterator[Schedule]:
    """Results through shared memory or not, another share of a column per thread, or more threads
    of a block across columns."""
    if first.kind == "column":
        yield replace(first, kind="transpose_column")
    else:  # Strided stores are not vectors.
        yield replace(first, kind="column", lanes=1)
    size, beside = first.threads, first.across
    shares = (2 * size, beside), (size, beside // 2), (4 * size, beside), (size, beside // 4)
    for threads, across in (*shares, (2 * size, beside // 2), (size // 2, beside)):
        down = max(1, threads // max(1, across))
        yield replace(first, threads=threads, across=across, unroll=max(1, -(-inner // down)))
    yield from _each(first, "lanes", first.lanes // 2, first.lanes * 2)


def _tiles(first: Schedule) -> Iterator[Schedule]:
    for tile in (SMALL_TILE, LARGE_TILE):
        threads = (first.threads, first.threads // 2, first.threads * 2)
        yield from _each(replace(first, tile=tile), "threads", *threads)
    if first.kind == "transpose_row":
        yield from _each(first, "splits", first.splits * 2, first.splits // 2)
    yield replace(first, lanes=first.lanes // 2)


def _with_threads(schedule: Schedule, threads: int) -> Schedule:
    """Rows share a block if a row has at most a warp. A block has at least a warp."""
    rows = max(1, 128 // max(1, threads)) if threads <= 32 else 1
    return replace(schedule, threads=threads, rows=rows)


def _holding(schedule: Schedule, threads: int, inner: int) -> Schedule:
    """Each thread holds its share of a row in registers."""
    unroll = max(1, -(-inner // max(1, threads * schedule.lanes)))
    return replace(_with_threads(schedule, threads), unroll=unroll, beyond=0, shared=0)


def _around_on_host(_: LoopKernel, first: Schedule, sizes: Sizes) -> Iterator[Schedule]:
    """Variations on the host, where a pointwise loop has no choices."""
    if first.kind not in ("row", "column"):
        return
    yield from _each(first, "splits", first.splits * 2, first.splits // 2, first.splits * 4, 1)
    for factor in (2, 4) if first.kind == "row" else (4, 16):
        yield from _each(first, "lanes", first.lanes // factor, first.lanes * factor)


LOOP = Kind(
    kernel=LoopKernel,
    words="loop kernel",
    schedules={"loop": Schedule},
    choose=choose,
    permits=legal,
    variations=_variations,
    workspace=lambda *each: Workspace(workspace_bytes(*each)),
    render=render_loop,
    elements=loop_elements,
    summands=_summands,
)
