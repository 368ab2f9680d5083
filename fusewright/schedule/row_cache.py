"""Element values that are cached from one sweep over a row to the next.

An exponential that two sweeps need is computed once. On the host the values are in a buffer that
stays in cache, on a GPU in the registers of a cached row. A later sweep then needs neither these
operators nor their operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusewright.ir.graph import HALF_DTYPES, ITEM_BYTES
from fusewright.ir.loop import Apply, Load, LoopKernel
from fusewright.ir.operators import REDUCTIONS, SCALAR_OPS
from fusewright.schedule.sweeps import Sweeps, early_loads

THREAD_REGISTERS = 48  # 4-byte registers of each thread that a cached row may use
BLOCK_REGISTERS = 65536
WORK_REGISTERS = 30  # registers that a kernel needs besides its cached row; softmax needs 24
WORD_BYTES = 16  # bytes of one access
BLOCK_SHARED_BYTES = 99 * 1024  # a block gets this much on every GPU that we compile for
SYSTEM_BYTES = 1024  # the driver takes this much per block
SHARED_ALIGN = 1024  # alignment of `shared` of kernels/cuda/row.cuh
SHARED_THREADS = 1536  # with 40 registers each
# operations that caching must save; softmax of 1024, 1 thread: 1.5 to 1.2 times eager
KEPT_COST = 12


def cache_values(kernel: LoopKernel, plan: Sweeps) -> tuple[Sweeps, dict[str, int]]:
    """The sweeps with fewer operators, and the sweep that computes each cached value."""
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
    """The element values of sweep k; a value cached before replaces its operands."""
    roots = [item.operand for item in plan.reductions[k]]
    roots += [item.value for item in plan.inner_stores] if k == plan.count - 1 else []
    live = {name for name in roots if plan.level.is_element[name]}
    for item in reversed(kernel.body):
        if isinstance(item, Apply) and item.name in live and first.get(item.name, k) == k:
            live.update(name for name in item.operands if plan.level.is_element[name])
    return frozenset(live)


def row_registers(kernel: LoopKernel, plan: Sweeps, kept: Mapping[str, int], elements: int) -> int:
    """The most 4-byte registers that a thread's elements of a row need between any two sweeps.

    A cached value replaces the loaded ones that no later sweep needs.
    """
    loads = early_loads(kernel, plan)
    made = {item.name: item for item in kernel.body if isinstance(item, Apply)}
    most = 0
    for done in range(plan.count):
        later = frozenset[str]().union(*plan.needed[done:])
        held: list[Load | Apply] = [load for load in loads if load.name in later]
        held += [made[name] for name, start in kept.items() if start < done and name in later]
        most = max(most, sum(max(1, _bytes(item) * elements // 4) for item in held))
    return most


def block_shared_bytes(
    kernel: LoopKernel, plan: Sweeps, lanes: int, threads: int, unroll: int
) -> int:
    """The most shared memory of a block: a row as in memory, and its warps' partial results."""
    each = [max(WORD_BYTES, ITEM_BYTES[x.dtype] * lanes) for x in early_loads(kernel, plan)]
    words = sum(REDUCTIONS[x.kind].state_words for items in plan.reductions for x in items)
    joined = 8 * words * (threads // 32)
    return threads * unroll * sum(each) + -(-joined // SHARED_ALIGN) * SHARED_ALIGN


def shared_rows(block_bytes: int, threads: int, processor_bytes: int) -> int:
    """How many such blocks, with a row each, a processor has memory and registers for."""
    if block_bytes > BLOCK_SHARED_BYTES:
        return 0
    return min(processor_bytes // (block_bytes + SYSTEM_BYTES), SHARED_THREADS // threads)


def free_registers(threads: int) -> int:
    """How many of a thread's registers a row may use if so many threads share a processor."""
    return min(THREAD_REGISTERS, BLOCK_REGISTERS // threads - WORK_REGISTERS)


def _bytes(item: Load | Apply) -> int:
    """Loaded values have their size in memory, computed ones their size in registers."""
    if isinstance(item, Apply) and item.dtype in HALF_DTYPES:
        return 4
    return ITEM_BYTES[item.dtype]
