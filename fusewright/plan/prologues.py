"""Loops before a convolution: what they compute is computed while the input is laid out as halves,
and never written, where nothing else reads it and that is expected to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusewright.convolution_cost import prefers_computed
from fusewright.ir import Node
from fusewright.loop import Access, Load, LoopKernel, Scan, Store, touches
from fusewright.plan.cost import loop_bytes
from fusewright.plan.endings import Epilogues, stored
from fusewright.plan.finish import kernel_of
from fusewright.plan.fuse import Group, memory_readers
from fusewright.plan.names import operators_of
from fusewright.plan.values import Values
from fusewright.rewrite.layouts import WINDOW
from fusewright.rewrite.products import operands_of
from fusewright.rewrite.windows import geometry_of
from fusewright.window import CHANNELS, by_eight, lies_along

MOST_LOADS = 4  # for every number (H200: of nine, as reflected images have, 61 instead of 44 µs)


def with_prologues(values: Values, ended: Epilogues) -> tuple[Mapping[str, LoopKernel], Epilogues]:
    """The loop that each window takes up, and what is left."""
    taken: dict[str, LoopKernel] = {}
    written, readers = stored(values, ended), list(memory_readers(values))
    loops = list(ended.loops)
    for node in values.graph.nodes:
        if node.op != WINDOW:
            continue
        source = operands_of(node)[0]
        alone = readers.count(source) == 1 and not _is_loaded(ended, source)
        for group in loops if alone else ():
            kernel = _prologue(values, group, source, written)
            if kernel is not None and _pays(values, node, kernel):
                taken[node.name] = kernel
                loops.remove(group)
                break
    return taken, replace(ended, loops=tuple(loops))


def _is_loaded(ended: Epilogues, name: str) -> bool:
    groups = (*ended.loops, *ended.of.values())
    return any(name in group.assembled.loads and name not in group.items for group in groups)


def _prologue(
    values: Values, group: Group, source: str, written: frozenset[str]
) -> LoopKernel | None:
    """The group as a loop over the source's points that makes nothing else."""
    if [item for item in group.items if item in written] != [source] or group.has_reduction:
        return None
    kernel = kernel_of(group.assembled, "source", "", (source,), values)
    spec = values.spec(source)
    (store,) = (item for item in kernel.body if isinstance(item, Store))
    whole = tuple(axis.size for axis in kernel.axes) == spec.shape
    if not whole or store.access != Access(source, spec.strides) or spec.dtype != "float32":
        return None
    loads = [item for item in kernel.body if isinstance(item, Load)]
    own = [item for item in loads if touches(item.access, CHANNELS + 1)]
    few = 0 < len(own) <= MOST_LOADS and not any(isinstance(i, Scan) for i in kernel.body)
    return replace(kernel, summary=" → ".join(operators_of(kernel))) if few else None


def _pays(values: Values, node: Node, kernel: LoopKernel) -> bool:
    source, weight = operands_of(node)
    of = geometry_of(node, values.spec(source), values.spec(weight))
    if not (lies_along(kernel, CHANNELS) or lies_along(kernel, len(kernel.axes) - 1)):
        return False
    held = {each.name: values.bytes_of(each.name) for each in kernel.arguments}
    read = loop_bytes(kernel, values.sizes, held) - values.bytes_of(source)
    return prefers_computed(of, by_eight(of), values.sizes, read)
