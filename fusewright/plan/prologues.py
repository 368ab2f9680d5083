"""Loops before a convolution: what they compute is computed while the input is laid out as halves,
and never written, where nothing else reads it and that is expected to be faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fusewright.cost.convolution import prefers_computed
from fusewright.ir.convolution import CHANNELS, by_eight, lies_along
from fusewright.ir.graph import ITEM_BYTES, Node
from fusewright.ir.loop import Access, Apply, Load, LoopKernel, Reduce, Scan, Store, touches
from fusewright.ir.operators import SCALAR_OPS
from fusewright.plan.cost import loop_bytes
from fusewright.plan.epilogues import Epilogues
from fusewright.plan.finish import pointwise_of
from fusewright.plan.fuse import Group
from fusewright.plan.staged_pairs import LinePairs
from fusewright.plan.values import Values
from fusewright.rewrite.convolutions import geometry_of
from fusewright.rewrite.layouts import WINDOW
from fusewright.rewrite.matmuls import operands_of

# Read for every number (H200: of 36, as reflected images have, 61 instead of 44 µs); loads that all
# numbers of a channel share; operators, and what they cost (six gelus take nvcc 18 s).
MOST_BYTES, MOST_SHARED, MOST_APPLIES, MOST_COST = 16, 8, 24, 80


def with_prologues(
    values: Values, ended: Epilogues, pairs: LinePairs, stored: Counter[str]
) -> tuple[Mapping[str, LoopKernel], Epilogues, Counter[str]]:
    """The loop that each window takes up, the loops that are left, and what is stored then: of one
    that makes something else, such as the sums of what it computes, that stays. Both of a pair read
    what is computed."""
    taken: dict[str, LoopKernel] = {}
    left = stored.copy()
    for node in values.graph.nodes:
        source = operands_of(node)[0] if node.op == WINDOW else ""
        readers = 2 if node.name in pairs.by_window else 1
        for group in ended.loops if left[source] == readers else ():
            kernel = _prologue(values, group, source)
            alone = [item for item in group.items if item in left] == [source]
            if kernel is not None and _pays(values, node, kernel, alone):
                taken[node.name] = kernel
                del left[source]
                break
    loops = (group for group in ended.loops if not left.keys().isdisjoint(group.items))
    return taken, replace(ended, loops=tuple(loops)), left


def _prologue(values: Values, group: Group, source: str) -> LoopKernel | None:
    """What the group computes of the source, as a loop over its points."""
    if source not in group.items:
        return None
    kernel = pointwise_of(group.assembled, source, values)
    if any(isinstance(item, Reduce) for item in kernel.body):
        return None
    spec = values.spec(source)
    (store,) = (item for item in kernel.body if isinstance(item, Store))
    whole = tuple(axis.size for axis in kernel.axes) == spec.shape
    if not whole or store.access != Access(source, spec.strides) or spec.dtype != "float32":
        return None
    return kernel if _is_small(kernel) else None


def _is_small(kernel: LoopKernel) -> bool:
    """Whether it reads little for a number, shares little, and is soon compiled: a thread has 32
    numbers at a time."""
    loads = [item for item in kernel.body if isinstance(item, Load)]
    own = [item for item in loads if touches(item.access, CHANNELS + 1)]
    applied = [item for item in kernel.body if isinstance(item, Apply)]
    if not own or any(isinstance(item, Scan) for item in kernel.body):
        return False
    few = len(loads) - len(own) <= MOST_SHARED and len(applied) <= MOST_APPLIES
    cost = sum(SCALAR_OPS[item.op].cost for item in applied)
    return few and sum(ITEM_BYTES[item.dtype] for item in own) <= MOST_BYTES and cost <= MOST_COST


def _pays(values: Values, node: Node, kernel: LoopKernel, alone: bool) -> bool:
    source, weight = operands_of(node)
    of = geometry_of(node, values.spec(source), values.spec(weight))
    if not (lies_along(kernel, CHANNELS) or lies_along(kernel, len(kernel.axes) - 1)):
        return False
    held = {each.name: values.bytes_of(each.name) for each in kernel.arguments}
    read = loop_bytes(kernel, values.sizes, held) - values.bytes_of(source)
    walks = {of, by_eight(of)}  # the first if it reduces its results
    return all(prefers_computed(of, each, values.sizes, read, alone) for each in walks)
