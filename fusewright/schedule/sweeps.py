"""What each sweep over the inner axes of a `LoopKernel` computes.

`level` says when a value can first be known; `sweeps` decides where the work is done. A reduction
runs in the first sweep that knows its operand, and all stores inside sweeps happen in the last one.
An output may share an input's memory, so nothing is written while a later sweep still reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.ir.loop import (
    Apply,
    Leveled,
    Load,
    LoopKernel,
    Reduce,
    Scan,
    Store,
    level,
    scans,
    touches,
)
from fusewright.ir.operators import REDUCTIONS


@dataclass(frozen=True)
class Sweeps:
    """`needed[k]` are the element values of sweep k, `reductions[k]` the reductions it runs, and
    `scans[k]` the scans whose operands it computes.

    `inner_stores` write at every element (in the last sweep), `row_stores` once per row (at the
    end).
    """

    level: Leveled
    count: int
    needed: tuple[frozenset[str], ...]
    reductions: tuple[tuple[Reduce, ...], ...]
    inner_stores: tuple[Store, ...]
    row_stores: tuple[Store, ...]
    scans: tuple[tuple[Scan, ...], ...] = ()


def sweeps(kernel: LoopKernel) -> Sweeps:
    """Assign every reduction and store of the kernel to a sweep."""
    leveled = level(kernel)
    n_outer = len(kernel.outer)
    stores = [item for item in kernel.body if isinstance(item, Store)]
    inside = tuple(
        item for item in stores if leveled.is_element[item.value] or touches(item.access, n_outer)
    )
    # Unlike in `level`, a row value that is stored along the inner axes needs one more sweep.
    count = max([leveled.phases, *(leveled.phase[item.value] + 1 for item in inside)])
    reduces = [item for item in kernel.body if isinstance(item, Reduce)]
    by_sweep = tuple(
        tuple(item for item in reduces if leveled.phase[item.operand] == k) for k in range(count)
    )
    scanned = tuple(
        tuple(item for item in scans(kernel) if leveled.phase[item.operand] == k)
        for k in range(count)
    )
    needed: list[frozenset[str]] = []
    for k in range(count):
        roots = [item.operand for item in by_sweep[k]] + [item.operand for item in scanned[k]]
        roots += [item.value for item in inside] if k == count - 1 else []
        needed.append(_element_values(kernel, leveled, roots))
    return Sweeps(
        leveled,
        count,
        tuple(needed),
        by_sweep,
        inside,
        tuple(item for item in stores if item not in inside),
        scanned,
    )


def _element_values(kernel: LoopKernel, leveled: Leveled, roots: list[str]) -> frozenset[str]:
    """The element values that the roots depend on, the roots included."""
    live = {name for name in roots if leveled.is_element[name]}
    for item in reversed(kernel.body):
        if isinstance(item, Apply) and item.name in live:
            live.update(name for name in item.operands if leveled.is_element[name])
    return frozenset(live)


def part_bytes(plan: Sweeps) -> int:
    """Bytes of one row's partial result: an upper bound for C++'s Acc<1>."""
    words = sum(REDUCTIONS[item.kind].state_words for item in plan.reductions[0])
    return 8 * max(1, words, sum(map(len, plan.scans)))


def is_one_scan(kernel: LoopKernel) -> bool:
    """Whether a kernel is a single scan of each row: all scans in one direction, and none depends
    on another or on a reduction."""
    found = scans(kernel)
    alone = not any(isinstance(item, Reduce) for item in kernel.body)
    one_way = len({item.backward for item in found}) == 1
    return alone and one_way and sweeps(kernel).count == 2


def element_loads(kernel: LoopKernel, plan: Sweeps) -> tuple[Load, ...]:
    """The loads that move along the inner axes, in the body's order."""
    return tuple(
        item for item in kernel.body if isinstance(item, Load) and plan.level.is_element[item.name]
    )


def early_loads(kernel: LoopKernel, plan: Sweeps) -> tuple[Load, ...]:
    """The loads at the start of a row."""
    return tuple(x for x in element_loads(kernel, plan) if not late_sweep(kernel, plan, x))


def element_accesses(kernel: LoopKernel, plan: Sweeps) -> tuple[Load | Store, ...]:
    """The loads and stores at every element."""
    return (*element_loads(kernel, plan), *plan.inner_stores)


def late_sweep(kernel: LoopKernel, plan: Sweeps, load: Load) -> int:
    """The later sweep that may start with this load; 0 if it belongs at the start of the row.

    A load is late if only one sweep needs it and all rows share it: it comes from the cache.
    """
    need = [k for k in range(plan.count) if load.name in plan.needed[k]]
    shared = not any(stride.factor for stride in load.access.strides[: len(kernel.outer)])
    return need[0] if len(need) == 1 and shared else 0
