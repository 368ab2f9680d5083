"""Vectors of rows of any length: they begin in each row where addresses are aligned.

What is read or written as vectors is contiguous as a whole. The few elements of a row beside its
vectors are computed one by one. Kernels here are in coalesced form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusewright.ir.graph import ONE, ZERO
from fusewright.ir.loop import Access, Load, LoopKernel, Store
from fusewright.schedule.choice import Schedule
from fusewright.schedule.sweeps import early_loads, element_loads, sweeps
from fusewright.schedule.vector_width import lanes_fit, widths

LEAST_FLAT_VECTORS = 32  # shorter rows leave most of a block idle


def flat_fits(kernel: LoopKernel, lanes: int) -> bool:
    """Whether vectors of a pointwise kernel may begin in each row where addresses are aligned: what
    is written is contiguous as a whole."""
    items = [item for item in kernel.body if isinstance(item, Load | Store)]
    return (
        lanes > 1
        and not kernel.inner
        and len(kernel.outer) > 1
        and not any(item.access.guards for item in items)
        and all(is_flat(kernel, item.access) for item in items if isinstance(item, Store))
        and all(_offset_fits(item.access, lanes) for item in items if is_flat(kernel, item.access))
    )


def flat_rows_fit(kernel: LoopKernel, lanes: int) -> bool:
    """Whether vectors of a row may begin where addresses are aligned: all that is read first and
    written along a row is contiguous as a whole."""
    plan = sweeps(kernel)
    first = [item.access for item in early_loads(kernel, plan)]
    held = [each for each in first if each.strides[-1] != ZERO]
    written = [item.access for item in plan.inner_stores]
    late = [item.access for item in element_loads(kernel, plan) if item.access not in first]
    return (
        lanes > 1
        and len(kernel.inner) == 1
        and bool(held)
        and not any(each.guards for each in (*first, *late))
        and all(is_flat(kernel, each) for each in (*held, *written))
        and all(_offset_fits(each, lanes) for each in (*held, *written))
    )


def is_flat(kernel: LoopKernel, access: Access) -> bool:
    """Whether an access walks all axes as one."""
    step = ONE
    for axis, stride in zip(reversed(kernel.axes), reversed(access.strides), strict=True):
        if stride != step:
            return False
        step = step * axis.size
    return True


def _offset_fits(access: Access, lanes: int) -> bool:
    return all(each.factor % lanes == 0 for each in access.offset if each.is_static)


def flat_vectors(kernel: LoopKernel, sizes: Mapping[str, int]) -> Schedule | None:
    """Vectors that run on from row to row, if rows are long and not made of whole vectors.

    A thread's own elements of a strided load are far from each other, so a warp would touch more
    cache lines at a time (H200, averages of 2x2, 2.7 GB: 1.26 ms)."""
    lanes = next(widths(kernel, "pointwise"))
    loads = [item.access for item in kernel.body if isinstance(item, Load)]
    if not flat_fits(kernel, lanes) or any(each.strides[-1] not in (ZERO, ONE) for each in loads):
        return None
    length = kernel.outer[-1].size.at(sizes)
    whole = length % lanes == 0 and lanes_fit(kernel, "pointwise", lanes)
    if whole or length < LEAST_FLAT_VECTORS * lanes:
        return None
    most = 2 if any(is_flat(kernel, each) for each in loads) else 4
    vectors = length / lanes
    shapes = [(threads, most >> halved) for threads in (256, 128) for halved in (0, 1, 2)]
    shapes = [(threads, unroll) for threads, unroll in shapes if unroll]
    # The first shape that fills its blocks; all others fill them less.
    threads, unroll = max(shapes, key=lambda each: round(_filled(vectors, *each), 1))
    return Schedule("pointwise", lanes, threads, unroll=unroll, flat=True)


def _filled(vectors: float, threads: int, unroll: int) -> float:
    """The share of a row's blocks that has work."""
    chunk = threads * unroll
    return vectors / (math.ceil(vectors / chunk) * chunk)
