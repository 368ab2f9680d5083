"""Prologues: loops that a convolution computes while it stages its input as fp16. Their result is
never written, if nothing else reads it and this is expected to be faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fusewright.cost.convolution import prefers_computed
from fusewright.ir.convolution import CHANNELS, by_eight, is_contiguous_along
from fusewright.ir.graph import ITEM_BYTES, Node
from fusewright.ir.loop import Access, Apply, Load, LoopKernel, Reduce, Scan, Store, touches
from fusewright.ir.operators import SCALAR_OPS
from fusewright.plan.epilogues import Epilogues
from fusewright.plan.finish import pointwise_of
from fusewright.plan.merge import Group
from fusewright.plan.staged_pairs import StagedPairs
from fusewright.plan.values import Values
from fusewright.rewrite.convolutions import geometry_of
from fusewright.rewrite.layouts import CONVOLUTION
from fusewright.rewrite.matmuls import operands_of

# Limits: bytes read per element (H200: with 36, as for reflected images, 61 instead of 44 µs),
# loads that all elements of a channel share, operators, and their cost (nvcc takes 18 s for six
# gelus).
MOST_BYTES, MOST_SHARED, MOST_APPLIES, MOST_COST = 16, 8, 24, 80


def with_prologues(
    values: Values, ended: Epilogues, pairs: StagedPairs, stored: Counter[str]
) -> tuple[Mapping[str, LoopKernel], Epilogues, Counter[str]]:
    """The prologue of each convolution, the loops that are left, and the values that are stored
    then. A loop stays if it also computes something else, such as sums. Both gradients of a pair
    read the prologue's result."""
    taken: dict[str, LoopKernel] = {}
    left = stored.copy()
    homes = {item: group for group in ended.loops for item in group.items}
    for node in values.graph.nodes:
        source = operands_of(node)[0] if node.op == CONVOLUTION else ""
        readers = 2 if node.name in pairs.by_convolution else 1
        group = homes.get(source) if left[source] == readers else None
        kernel = _prologue(values, group, source) if group is not None else None
        if group is None or kernel is None:
            continue
        alone = [item for item in group.items if item in left] == [source]
        if _pays(values, node, kernel, alone):
            taken[node.name] = kernel
            del left[source]
    loops = (group for group in ended.loops if not left.keys().isdisjoint(group.items))
    return taken, replace(ended, loops=tuple(loops)), left


def _prologue(values: Values, group: Group, source: str) -> LoopKernel | None:
    """The part of a group that computes the convolution's input, as a loop over its points."""
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
    """Whether it reads and shares little, and compiles quickly: a thread has 32 elements at a
    time."""
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
    if not (
        is_contiguous_along(kernel, CHANNELS) or is_contiguous_along(kernel, len(kernel.axes) - 1)
    ):
        return False
    held = {each.name: values.bytes_of(each.name) for each in kernel.arguments}
    read = kernel.bytes_moved(values.sizes, held) - values.bytes_of(source)
    walks = {of, by_eight(of)}  # `of` itself if the convolution reduces its result
    known = values.sizes, values.target, read, alone
    return all(prefers_computed(of, each, *known) for each in walks)
