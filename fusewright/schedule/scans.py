"""How a kernel that scans is mapped to the machine: along its rows, or down its columns.

`scan_fits` is the part of `legal` for such schedules; `scan_candidates` proposes them. Kernels here
are in coalesced form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fusewright.ir.graph import HALF_DTYPES, ITEM_BYTES, ONE
from fusewright.ir.loop import LoopKernel, scans
from fusewright.schedule.choice import HOST_RUN, Schedule
from fusewright.schedule.sweeps import (
    element_accesses,
    element_loads,
    is_one_scan,
    part_bytes,
    sweeps,
)
from fusewright.schedule.transpose_tiles import reach
from fusewright.schedule.vector_width import lanes_fit, widths
from fusewright.target.target import SHARED_BYTES, Target

WARP = 32
COLUMN_RUN = 256  # columns that a host thread scans together
MOST_PARTS = 1024  # of a row
MOST_COLUMN_PARTS = 64  # one thread joins them one after the other
MOST_DOWN = 16
HELD = 48  # registers for the elements that a thread has loaded and scans
LEAST_ACROSS = 8  # columns: floats of a sector


def scan_fits(kernel: LoopKernel, schedule: Schedule, target: Target) -> bool:
    """Whether the schedule computes this kernel correctly."""
    known = schedule.kind == "scan" or (schedule.kind == "scan_column" and bool(kernel.outer))
    least = min(schedule.lanes, schedule.threads, schedule.unroll, schedule.splits, schedule.rows)
    if not (known and least >= 1 and is_one_scan(kernel)) or schedule.cached:
        return False
    if target.language == "host":
        return schedule.lanes <= HOST_RUN and schedule.splits == 1
    if not lanes_fit(kernel, schedule.kind, schedule.lanes):
        return False
    return _row_fits(schedule) if schedule.kind == "scan" else _column_fits(kernel, schedule)


def _row_fits(schedule: Schedule) -> bool:
    """Rows share a block if each has at most one warp. One warp scans the totals of a block's
    warps, for each of the vectors in flight."""
    threads = schedule.threads
    if threads & (threads - 1) or threads * schedule.rows > 1024:
        return False
    if threads <= WARP:
        return threads * schedule.rows % WARP == 0 and schedule.splits == 1
    return schedule.rows == 1 and threads // WARP * schedule.unroll <= WARP


def _column_fits(kernel: LoopKernel, schedule: Schedule) -> bool:
    threads, across = schedule.threads, schedule.across
    totals = 2 * threads * schedule.lanes * part_bytes(sweeps(kernel))
    whole = across >= 1 and threads % across == 0 and threads % WARP == 0 and threads <= 1024
    return whole and totals <= SHARED_BYTES


def scan_candidates(
    kernel: LoopKernel, target: Target, sizes: Mapping[str, int]
) -> Iterator[Schedule]:
    """Schedules to try, best guess first; some may not be legal."""
    kinds = ("scan_column", "scan") if _prefers_columns(kernel, sizes) else ("scan",)
    for kind in kinds:
        if target.language == "host":
            yield Schedule(kind, lanes=_run(kernel) if kind == "scan" else COLUMN_RUN)
        elif kind == "scan":
            yield from _rows(kernel, target, sizes)
        else:
            yield from _columns(kernel, target, sizes)


def _run(kernel: LoopKernel) -> int:
    """Short runs of a row, which g++ unrolls (2 M floats, one thread: 2.2 ms, with 64 lanes 3.0,
    eager 2.1; bfloat16 3.5 ms with 32 lanes and 5.2 with 16)."""
    has_half = any(each.dtype in HALF_DTYPES for each in kernel.arguments)
    return 32 if has_half else 16


def _prefers_columns(kernel: LoopKernel, sizes: Mapping[str, int]) -> bool:
    """Whether most bytes are contiguous along the last outer axis, if it has enough columns."""
    if not kernel.outer or kernel.outer[-1].size.at(sizes) < LEAST_ACROSS:
        return False
    along = down = 0
    last = len(kernel.outer) - 1
    for item in element_accesses(kernel, sweeps(kernel)):
        moved = ITEM_BYTES[item.dtype] * reach(item.access, kernel, sizes)
        along += moved * (item.access.strides[-1] == ONE)
        down += moved * (item.access.strides[last] == ONE)
    return down > along


def _rows(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    """The fewest threads that hold a row at once, up to a block of 256. If rows are too few to fill
    the machine, they are split, and read twice."""
    inner, outer = kernel.inner_numel.at(sizes), kernel.outer_numel.at(sizes)
    held = [item.dtype for item in element_loads(kernel, sweeps(kernel))]
    held += [item.dtype for item in scans(kernel)]
    words = sum(max(1, ITEM_BYTES[dtype] // 4) for dtype in held)
    for lanes in widths(kernel, "scan"):
        for threads in (4, 8, 16, 32, 64, 128, 256):
            most = min(4 if threads > WARP else 2, max(1, HELD // (lanes * words)))
            unroll = min(most, max(1, -(-inner // (threads * lanes))))
            if threads < 256 and threads * lanes * unroll < inner:
                continue
            rows = max(1, 128 // threads) if threads <= WARP else 1
            chunk = threads * lanes * unroll
            splits = _splits(outer, inner, chunk, target.sms, MOST_PARTS)
            yield Schedule("scan", lanes, threads, rows=rows, unroll=unroll, splits=splits)
            break


def _splits(blocks: int, inner: int, chunk: int, sms: int, most: int) -> int:
    """Parts of two chunks or more each, if rows alone leave most processors idle."""
    if 2 * blocks >= sms or inner < 16 * chunk:
        return 1
    return min(inner // (2 * chunk), -(-4 * sms // max(1, blocks)), most)


def _columns(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    """Threads side by side in memory, and enough of them down a column to keep loads in flight."""
    inner, outer = kernel.inner_numel.at(sizes), kernel.outer_numel.at(sizes)
    loads = len(element_loads(kernel, sweeps(kernel)))
    size = max(ITEM_BYTES[item.dtype] for item in element_accesses(kernel, sweeps(kernel)))
    across = WARP
    while across > LEAST_ACROSS and across >= 2 * outer:
        across //= 2
    for lanes in (2, 1) if size <= 2 else (1,):
        for threads in (min(512, MOST_DOWN * across), 128):
            unroll = 8 if loads == 1 else 4
            while unroll > 1 and threads // across * unroll >= 2 * inner:
                unroll //= 2
            blocks, chunk = -(-outer // (across * lanes)), threads // across * unroll
            splits = _splits(blocks, inner, chunk, target.sms, MOST_COLUMN_PARTS)
            yield Schedule(
                "scan_column", lanes, threads, across=across, unroll=unroll, splits=splits
            )
