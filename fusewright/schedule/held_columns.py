"""Columns that a thread block holds in registers for all sweeps over them.

Softmax over the channels of images, or a norm of them: an element's neighbour in memory belongs to
the next column. kernels/cuda/held_column.cuh reads each of them once.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.ir.loop import LoopKernel, scans
from fusewright.ir.operators import REDUCTIONS
from fusewright.schedule.choice import Schedule
from fusewright.schedule.row_cache import free_registers, keep, row_registers
from fusewright.schedule.sweeps import Sweeps, sweeps
from fusewright.schedule.vector_width import column_widths, lanes_fit, lies_in_columns
from fusewright.target.target import SHARED_BYTES

ACROSS = 32
DOWN = (4, 8, 16, 32)  # threads that share a column
ELEMENTS = (8, 16)  # of a column that a thread holds, rather the fewer
LEAST_COLUMNS = 4096  # fewer leave processors without work


def held_column(kernel: LoopKernel, sizes: Mapping[str, int]) -> Schedule | None:
    """How a coalesced kernel of several sweeps holds its columns; None where it had better not."""
    inner = kernel.inner_numel
    if scans(kernel) or not kernel.inner or not inner.is_static:
        return None
    many = kernel.outer_numel.at(sizes) >= LEAST_COLUMNS
    if sweeps(kernel).count == 1 or not many or not lies_in_columns(kernel, sizes):
        return None
    for lanes in column_widths(kernel):
        for most in ELEMENTS:
            for down in DOWN:
                each = max(1, -(-inner.factor // down))
                found = Schedule("column", lanes, ACROSS * down, unroll=each, cached=True)
                if each <= most and holds_columns(kernel, found):
                    return found
    return None


def holds_columns(kernel: LoopKernel, schedule: Schedule) -> bool:
    """Whether all elements of the columns find room, and what their threads have to join."""
    threads, across, lanes = schedule.threads, schedule.across, schedule.lanes
    inner, plan = kernel.inner_numel, sweeps(kernel)
    whole = inner.is_static and inner.factor <= threads // across * schedule.unroll
    if not whole or not lanes_fit(kernel, "column", lanes):
        return False
    kept_plan, kept = keep(kernel, plan)
    taken = row_registers(kernel, kept_plan, kept, lanes * schedule.unroll)
    joined = threads * lanes * 8 * _state_words(plan)
    return taken <= free_registers(threads) and joined <= SHARED_BYTES


def _state_words(plan: Sweeps) -> int:
    return max(sum(REDUCTIONS[x.kind].state_words for x in items) for items in plan.reductions)
