"""Columns that a thread block holds in registers for all sweeps over them.

For example softmax or a norm over the channels of images: neighbours in memory belong to different
columns. kernels/cuda/held_column.cuh reads each element once. Stores that are contiguous along a
column instead go through shared memory, in kernels/cuda/transpose_column.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.ir.loop import LoopKernel, scans
from fusewright.ir.operators import REDUCTIONS
from fusewright.schedule.choice import Schedule
from fusewright.schedule.row_cache import (
    BLOCK_SHARED_BYTES,
    cache_values,
    free_registers,
    row_registers,
)
from fusewright.schedule.sweeps import Sweeps, sweeps
from fusewright.schedule.transpose_tiles import column_tile_bytes, staged_stores, stages_stores
from fusewright.schedule.vector_width import column_widths, is_contiguous_in_columns, lanes_fit
from fusewright.target.target import SHARED_BYTES

ACROSS = 32
DOWN = (4, 8, 16, 32)  # threads that share a column
ELEMENTS = (8, 16)  # elements of a column per thread; fewer are better
LEAST_COLUMNS = 4096  # fewer leave processors idle


def held_column(kernel: LoopKernel, sizes: Mapping[str, int]) -> Schedule | None:
    """How a coalesced kernel of several sweeps holds its columns; None if it should not."""
    inner = kernel.inner_numel
    if scans(kernel) or not kernel.inner or not inner.is_static:
        return None
    many = kernel.outer_numel.at(sizes) >= LEAST_COLUMNS
    if sweeps(kernel).count == 1 or not many or not is_contiguous_in_columns(kernel, sizes):
        return None
    for kind in ("transpose_column", "column") if stages_stores(kernel, sizes) else ("column",):
        for lanes in column_widths(kernel):
            for most in ELEMENTS:
                for down in DOWN:
                    each = max(1, -(-inner.factor // down))
                    found = Schedule(kind, lanes, ACROSS * down, unroll=each, cached=True)
                    if each <= most and holds_columns(kernel, found):
                        return found
    return None


def holds_columns(kernel: LoopKernel, schedule: Schedule) -> bool:
    """Whether registers have room for the columns, and shared memory for partial results and for
    what goes through it."""
    threads, across, lanes = schedule.threads, schedule.across, schedule.lanes
    inner, plan = kernel.inner_numel, sweeps(kernel)
    whole = inner.is_static and 0 < inner.factor <= threads // across * schedule.unroll
    if not whole or not lanes_fit(kernel, schedule.kind, lanes):
        return False
    kept_plan, kept = cache_values(kernel, plan)
    taken = row_registers(kernel, kept_plan, kept, lanes * schedule.unroll)
    joined = threads * lanes * 8 * _state_words(plan)
    if taken > free_registers(threads) or joined > SHARED_BYTES:
        return False
    if schedule.kind == "column":
        return True
    held = threads // across * schedule.unroll
    tiles = column_tile_bytes(kernel, across * lanes, held)
    return bool(staged_stores(kernel)) and joined + tiles <= BLOCK_SHARED_BYTES


def _state_words(plan: Sweeps) -> int:
    return max(sum(REDUCTIONS[x.kind].state_words for x in items) for items in plan.reductions)
