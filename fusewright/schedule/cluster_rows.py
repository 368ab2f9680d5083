"""Long rows in the shared memory of a thread block cluster, so that memory is read once.

Each block of a cluster holds a part of the row, and hears of the other blocks what they have
reduced (kernels/cuda/cluster_row.cuh). Kernels here are in coalesced form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusewright.ir.graph import ITEM_BYTES
from fusewright.ir.loop import LoopKernel
from fusewright.ir.operators import REDUCTIONS
from fusewright.schedule.choice import Schedule
from fusewright.schedule.row_cache import SHARED_ALIGN, SHARED_THREADS, SYSTEM_BYTES
from fusewright.schedule.sweeps import Sweeps, early_loads, sweeps
from fusewright.target.target import Target

CLUSTERS = (2, 4, 8, 16)
MOST_UNROLL = 32
BLOCK_SHARED_BYTES = 227 * 1024  # of GPUs that have clusters
PART_BYTES = 32  # kClusterPartBytes of kernels/cuda/cluster_row.cuh


def clusters_fit(kernel: LoopKernel, schedule: Schedule, target: Target) -> bool:
    """Whether a cluster's shared memory has room for a row that is swept more than once."""
    size, plan = kernel.inner_numel, sweeps(kernel)
    held = early_loads(kernel, plan)
    per_cluster = schedule.threads * schedule.lanes * schedule.unroll * schedule.cluster
    each = [REDUCTIONS[x.kind].state_words for items in plan.reductions for x in items]
    return (
        target.clusters
        and schedule.cached
        and schedule.cluster in CLUSTERS
        and (schedule.rows, schedule.splits, schedule.beyond) == (1, 1, 0)
        and schedule.threads > 32
        and plan.count > 1
        and size.is_static
        and size.factor <= per_cluster
        and not (schedule.flat and size.factor < 2 * schedule.lanes)
        and bool(held)
        and all(ITEM_BYTES[x.dtype] * schedule.lanes >= 4 for x in held)
        and 8 * sum(each) <= PART_BYTES
        and 1 <= schedule.shared <= _blocks(kernel, plan, schedule, target.shared_bytes)
    )


def clusters(
    kernel: LoopKernel,
    plan: Sweeps,
    inner: int,
    lanes: int,
    target: Target,
    flat: bool = False,
) -> Iterator[Schedule]:
    """A row in the shared memory of as few blocks as possible, of which a processor has three, so
    that some of them copy while another one computes; otherwise two or one (H200, softmax of
    4096 × 393216 floats, 16 blocks a row and two at once: 4.14 ms; eight and one 4.61; reading the
    row three times 6.07). With two operands, reading them again was faster (gradient of the same:
    8.66 and 7.56 ms)."""
    if not target.clusters or len(early_loads(kernel, plan)) > 1:
        return
    for least, sizes in ((3, CLUSTERS), (2, CLUSTERS), (1, (8, 16))):
        for cluster in sizes:
            for threads in (512, 1024):
                unroll = -(-inner // (cluster * threads * lanes))
                row = Schedule("row", lanes, threads, unroll=unroll, cached=True, cluster=cluster)
                row = replace(row, flat=flat)
                room = _blocks(kernel, plan, row, target.shared_bytes)
                if room >= least and unroll <= MOST_UNROLL:
                    yield replace(row, shared=room)


def _shared_bytes(kernel: LoopKernel, plan: Sweeps, schedule: Schedule) -> int:
    """Shared memory of a block: its part of a row, and what it hears from the other blocks."""
    each = sum(ITEM_BYTES[x.dtype] * schedule.lanes for x in early_loads(kernel, plan))
    parts = 2 * plan.count * schedule.cluster * PART_BYTES
    return schedule.threads * schedule.unroll * each + parts + SHARED_ALIGN


def _blocks(kernel: LoopKernel, plan: Sweeps, schedule: Schedule, available: int) -> int:
    """How many blocks of clusters a processor has memory and registers for."""
    taken = _shared_bytes(kernel, plan, schedule)
    if taken > BLOCK_SHARED_BYTES:
        return 0
    return min(available // (taken + SYSTEM_BYTES), SHARED_THREADS // schedule.threads)
