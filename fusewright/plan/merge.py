"""Whether two groups of values may share a kernel.

A merge is legal if the group has one iteration space, reads no value at an index other than its
own, and makes no cycle through another group or a call (see `dependencies`). Elements may read a
reduction of the same group only if rows can be held close (see `holds_rows`). A scan shares a
kernel with what is read and computed along its axis, and with nothing that needs its last value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from fusewright.ir.loop import Apply, Load, LoopKernel, Store, level, scans
from fusewright.plan.assemble import Assembled, assemble
from fusewright.plan.dependencies import Items
from fusewright.plan.domain import Domain
from fusewright.plan.finish import kernel_of
from fusewright.plan.frames import NotFusibleError
from fusewright.plan.rows import holds_rows, holds_whole_columns, order_of
from fusewright.plan.values import Values
from fusewright.schedule.sweeps import is_one_scan, part_bytes, sweeps

# An epilogue runs in the registers that the accumulators leave.
EPILOGUE_APPLIES = 60
# Of a reduction's partial result: a warpgroup exchanges these in 8.5 KB of shared memory.
EPILOGUE_PART_BYTES = 32
EPILOGUE_LOADS = 9  # the matmul's result included


@dataclass(frozen=True)
class Group:
    """Values that one kernel computes, and its body."""

    items: Items
    assembled: Assembled
    values: Values = field(repr=False, compare=False)

    @property
    def has_reduction(self) -> bool:
        return bool(self.assembled.domain.reduced_axes)

    @cached_property
    def kernel(self) -> LoopKernel:
        """The kernel that stores all items; rules about groups are rules about this one."""
        return kernel_of(self.assembled, "trial", "", self.items, self.values)


def group_of(values: Values, items: Items, domain: Domain) -> Group:
    """The group of these values over an iteration space. Raises NotFusibleError."""
    return Group(items, assemble(values, items, domain), values)


def merged(values: Values, first: Group, second: Group, domain: Domain) -> Group | None:
    """Two groups as one, over one iteration space, if a kernel may compute both."""
    items = tuple(sorted({*first.items, *second.items}, key=values.order.__getitem__))
    ended = [values.ends[item] for item in items if item in values.ends]
    if len(ended) > 1 or (ended and domain.reduced_axes):
        return None
    try:
        both = group_of(values, items, domain)
    except NotFusibleError:
        return None
    if scans(both.kernel):
        if not is_one_scan(both.kernel):
            return None
    elif _reads_rows_again(both.kernel) and not (
        holds_rows(values, both.kernel) or holds_whole_columns(values, both.kernel)
    ):
        return None
    if ended and not _can_end(values, ended[0], both.kernel):
        return None
    return both


def reads_once_more(both: Group, first: Group, second: Group, shared: str) -> bool:
    """Whether two groups as one read a tensor in as many orders as they do alone."""
    return _ways(both.kernel, shared) >= sum(_ways(g.kernel, shared) for g in (first, second))


def reads_in_one_order(group: Group) -> bool:
    """Whether all that a group reads has its neighbours along the same axes, so that the loop is as
    good for a larger batch than the example's."""
    loads = [item.access for item in group.kernel.body if isinstance(item, Load)]
    return len({order_of(group.kernel, each) for each in loads} - {()}) <= 1


def _ways(kernel: LoopKernel, buffer: str) -> int:
    """In how many orders a tensor is read. Each order is a read of its own, and at most one of them
    is the order in memory."""
    loads = [item for item in kernel.body if isinstance(item, Load)]
    return len({item.access.strides for item in loads if item.access.buffer == buffer})


def _can_end(values: Values, matmul: str, kernel: LoopKernel) -> bool:
    """Whether a group that should be a matmul's epilogue still can be one. Reductions join it
    later, if they find nothing better."""
    if not is_epilogue(kernel):
        return False
    return matmul not in values.convolutions or len(orders_of_stores(kernel)) == 1


def orders_of_stores(kernel: LoopKernel) -> set[tuple[int, ...]]:
    """The orders of axes in which neighbours are written. A convolution's epilogue has neighbouring
    positions; a store by channels would scatter them (H200, 64 channels of 16×56²: 77 instead of 20
    µs, and a copy takes 9)."""
    return {order_of(kernel, item.access) for item in kernel.body if isinstance(item, Store)}


def is_epilogue(kernel: LoopKernel) -> bool:
    """Whether a kernel fits into the registers that a matmul leaves: it is short, reduces in at
    most one sweep, and has small partial results."""
    plan = sweeps(kernel)
    if plan.count > 1 or (kernel.inner and part_bytes(plan) > EPILOGUE_PART_BYTES):
        return False
    if any(isinstance(item, Load) and item.access.guards for item in kernel.body):
        return False
    applies = sum(isinstance(item, Apply) for item in kernel.body)
    loads = {item.access.buffer for item in kernel.body if isinstance(item, Load)}
    return applies <= EPILOGUE_APPLIES and len(loads) <= EPILOGUE_LOADS


def common_domain(first: Group, second: Group) -> Domain | None:
    """The iteration space of the group that reduces; two pointwise groups need equal sizes."""
    left, right = first.assembled.domain, second.assembled.domain
    if left.reduced_axes:
        return left
    if right.reduced_axes:
        return right
    if left.numel != right.numel:
        return None
    return left if len(left.sizes) >= len(right.sizes) else right


def _reads_rows_again(kernel: LoopKernel) -> bool:
    """Whether an element value depends on a reduction of the same kernel."""
    return level(kernel).phases > 1
