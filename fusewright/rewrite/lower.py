"""From ATen to the canonical operators of planning and of the loop language.

The input is a graph of ATen overloads. The output computes the same with scalar operators, `full`,
`iota`, `pad`, four views, `reduce_*`, `scan_*` and `getitem`. All other ATen operators stay, and
the plan shows them as PyTorch calls.
"""

from __future__ import annotations

from collections import Counter

from fusewright.ir.graph import LOOP_DTYPES, Graph, Node, Ref
from fusewright.rewrite.arg_extremes import (
    ARG_EXTREMES,
    arg_extreme_alone,
    has_arg_extreme,
    lower_arg_extreme,
)
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.elsewhere import Elsewhere
from fusewright.rewrite.max_pooling import POOL_OFFSETS, POOL_OFFSETS_BACKWARD, gathered, largest
from fusewright.rewrite.mean_gradients import MEAN_GRADIENTS
from fusewright.rewrite.padding import PADS
from fusewright.rewrite.pointwise import (
    CLASS_INDEX,
    SIMPLE,
    SPECIAL,
    lower_simple,
    may_divide_by_zero,
)
from fusewright.rewrite.pooling import POOLS, VALUES, values_alone
from fusewright.rewrite.reductions import PAIRED_VARIANCES, REDUCTIONS, lower_variance
from fusewright.rewrite.scans import SCANS
from fusewright.rewrite.sources import SOURCES
from fusewright.rewrite.views import SPLITS, VIEWS, piece_of_split


def lower(graph: Graph) -> Graph:
    builder = Builder(graph.inputs)
    device = main_device(graph)
    pairs: dict[str, tuple[Ref, Ref]] = {}
    splits: dict[str, Node] = {}
    items = {_base(item): item for item in graph.nodes if item.op == "getitem"}
    others_read = _other_results_read(graph)
    whole: dict[str, Node] = {}
    elsewhere = Elsewhere(builder, device, lambda near: _lowered(builder, near, device))
    for node in graph.nodes:
        known = builder.resolved(node)
        result: Ref | None = None
        if node.op == "getitem" and _base(node) in pairs:
            result = pairs[_base(node)][_index(node)]
        elif node.op == "getitem" and _base(node) in splits:
            result = piece_of_split(builder, splits[_base(node)], _index(node), node)
        elif node.op == "getitem" and _base(node) in whole:
            result = _part_alone(builder, whole[_base(node)], known)
        elif node.op in PAIRED_VARIANCES and node.name in items and _loop_types(builder, known):
            spec = items[node.name].spec
            assert spec is not None
            root = PAIRED_VARIANCES[node.op]
            pairs[node.name] = lower_variance(builder, known, spec, root=root)
            continue
        elif node.op == POOL_OFFSETS and node.name in items:
            spec = items[node.name].spec
            assert spec is not None
            pairs[node.name] = largest(builder, known, spec)
            continue
        else:
            result = _lowered(builder, elsewhere.reading(known), device)
        if node.op in SPLITS:
            splits[node.name] = known
        looped = node.op in VALUES and _may_loop(builder, known, device)
        if looped and (node.name not in others_read or has_arg_extreme(builder, known)):
            whole[node.name] = known
        added = result if result is not None else builder.add(known)
        builder.substitute(node.name, added)
        elsewhere.note(known, added.name)
    return builder.graph(graph.outputs)


def _part_alone(builder: Builder, node: Node, wanted: Node) -> Ref | None:
    """One of two results, `wanted`; None if it stays PyTorch's."""
    if _index(wanted) == 0:
        return values_alone(builder, node, wanted)
    return arg_extreme_alone(builder, node, wanted) if has_arg_extreme(builder, node) else None


def _other_results_read(graph: Graph) -> frozenset[str]:
    """Nodes with several results of which another than the first is read."""
    read = {name for node in graph.nodes for name in node.refs()}
    read |= {each for each in graph.outputs if isinstance(each, str)}
    return frozenset(
        _base(node)
        for node in graph.nodes
        if node.op == "getitem" and node.name in read and _index(node) != 0
    )


def _may_loop(builder: Builder, node: Node, device: str) -> bool:
    here = all(builder.spec(name).device == device for name in node.refs())
    return here and _loop_types(builder, node)


def _base(node: Node) -> str:
    return node.args[0].name if isinstance(node.args[0], Ref) else ""


def _index(node: Node) -> int:
    assert isinstance(node.args[1], int)
    return node.args[1]


def _loop_types(builder: Builder, node: Node) -> bool:
    """Whether loops support the dtypes of all tensors that a node reads and writes."""
    held = [builder.specs[name] for name in node.refs()]
    if node.spec is not None:
        held.append(node.spec)
    return all(spec is not None and spec.dtype in LOOP_DTYPES for spec in held)


def main_device(graph: Graph) -> str:
    """The device of most tensors in the graph; the kernels run there."""
    made = [node.spec for node in graph.nodes if node.spec is not None]
    held = [spec.device for spec in made if spec.shape]
    held += [each.spec.device for each in graph.inputs if each.spec.shape]
    held = held or [spec.device for spec in made]
    return Counter(held).most_common(1)[0][0] if held else "cpu"


def _on_main_device(builder: Builder, node: Node, device: str) -> bool:
    assert node.spec is not None
    return node.spec.device == device and all(
        builder.spec(name).device == device for name in node.refs()
    )


def _lowered(builder: Builder, node: Node, device: str) -> Ref | None:
    """The canonical form of one node, or None if it stays PyTorch's."""
    if node.spec is None or not _loop_types(builder, node):
        if node.op in VIEWS and node.spec is not None:
            return VIEWS[node.op](builder, node)
        return None
    if node.op in VIEWS:
        return VIEWS[node.op](builder, node)
    if not _on_main_device(builder, node, device):
        # Elsewhere, loops do not run, and the check of class indices is dropped.
        return node.args[0] if node.op == CLASS_INDEX and isinstance(node.args[0], Ref) else None
    if may_divide_by_zero(builder, node):
        return None
    if node.op in SIMPLE:
        return lower_simple(builder, node)
    if node.op in SPECIAL:
        return SPECIAL[node.op](builder, node)
    if node.op in SOURCES:
        return SOURCES[node.op](builder, node)
    if node.op in REDUCTIONS:
        return REDUCTIONS[node.op](builder, node)
    if node.op in SCANS:
        return SCANS[node.op](builder, node)
    if node.op in POOLS:
        return POOLS[node.op](builder, node)
    if node.op in MEAN_GRADIENTS:
        return MEAN_GRADIENTS[node.op](builder, node)
    if node.op in ARG_EXTREMES:
        return lower_arg_extreme(builder, node)
    if node.op == POOL_OFFSETS_BACKWARD:
        return gathered(builder, node)
    if node.op in PADS:
        return PADS[node.op](builder, node)
    return None
