"""Element values that the host keeps from one sweep over a row to the next.

An exponential that two sweeps need is computed once: the row's values wait in a buffer that stays
in cache. A later sweep then needs neither them nor what they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusewright.loop import Apply, LoopKernel
from fusewright.optable import SCALAR_OPS
from fusewright.sweep import Sweeps

KEPT_COST = 12  # what reading back must save; softmax of 1024, 1 thread: 1.5 to 1.2 times eager


def keep(kernel: LoopKernel, plan: Sweeps) -> tuple[Sweeps, dict[str, int]]:
    """The sweeps with less to compute, and the sweep that computes each kept value."""
    costly = [
        item.name
        for item in kernel.body
        if isinstance(item, Apply) and SCALAR_OPS[item.op].cost >= KEPT_COST
    ]
    first = {
        name: min(k for k, names in enumerate(plan.needed) if name in names)
        for name in costly
        if sum(name in names for names in plan.needed) > 1
    }
    needed = tuple(_needed(kernel, plan, k, first) for k in range(plan.count))
    kept = {
        name: start
        for name, start in first.items()
        if any(name in names for names in needed[start + 1 :])
    }
    return replace(plan, needed=needed), kept


def _needed(kernel: LoopKernel, plan: Sweeps, k: int, first: Mapping[str, int]) -> frozenset[str]:
    """The element values of sweep k, those kept from before standing for what made them."""
    roots = [item.operand for item in plan.reductions[k]]
    roots += [item.value for item in plan.inner_stores] if k == plan.count - 1 else []
    live = {name for name in roots if plan.level.is_element[name]}
    for item in reversed(kernel.body):
        if isinstance(item, Apply) and item.name in live and first.get(item.name, k) == k:
            live.update(name for name in item.operands if plan.level.is_element[name])
    return frozenset(live)
