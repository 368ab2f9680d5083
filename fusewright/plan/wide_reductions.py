"""Wide reductions next to narrow ones: Σ over (batch, feature) as Σ over feature of Σ over batch.

The gradient of a scalar parameter sums over everything, while the bias next to it sums over the
batch alone. In two steps, the wide sum shares the narrow one's read of memory, and only a sum over
one row is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusewright.ir.graph import (
    HALF_DTYPES,
    ONE,
    Dim,
    Graph,
    Node,
    Ref,
    TensorSpec,
    contiguous_strides,
)
from fusewright.plan.values import Values, is_pointwise, is_view

ShapeAndDims = tuple[tuple[Dim, ...], frozenset[int]]
_ASSOCIATIVE = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_any", "reduce_all"})


def split_wide_reductions(values: Values) -> Graph:
    graph = values.graph
    reductions = [node for node in graph.nodes if node.op.startswith("reduce_")]
    alike: dict[ShapeAndDims, list[Node]] = {}
    for node in reductions:
        alike.setdefault(_shape_and_dims(values, node), []).append(node)
    narrow = {node.name: _narrower(values, node, alike) for node in reductions}
    nodes: list[Node] = []
    for node in graph.nodes:
        dims = narrow.get(node.name)
        nodes += _in_two(values, node, dims) if dims else [node]
    return replace(graph, nodes=tuple(nodes))


def _shape_and_dims(values: Values, node: Node) -> ShapeAndDims:
    """The operand's shape without ones, and the reduced positions in it."""
    assert isinstance(node.args[0], Ref) and isinstance(node.args[1], tuple)
    shape = values.spec(node.args[0].name).shape
    kept = [position for position, size in enumerate(shape) if size != ONE]
    dims = frozenset(kept.index(d) for d in node.args[1] if isinstance(d, int) and d in kept)
    return tuple(shape[position] for position in kept), dims


def _rounds_parts(values: Values, node: Node) -> bool:
    """A partial sum in a 16-bit type would lose digits, or overflow, in memory."""
    assert isinstance(node.args[0], Ref)
    half = values.spec(node.args[0].name).dtype in HALF_DTYPES
    return half and node.op == "reduce_sum"


def _narrower(
    values: Values, node: Node, alike: Mapping[ShapeAndDims, Sequence[Node]]
) -> tuple[int, ...] | None:
    """Positions in the operand that a neighbour reduces, if they are some but not all of ours.
    `alike` are all reductions, by what they reduce."""
    if node.op not in _ASSOCIATIVE or _rounds_parts(values, node):
        return None
    shape, dims = _shape_and_dims(values, node)
    assert isinstance(node.args[0], Ref)
    own_shape = values.spec(node.args[0].name).shape
    kept = [position for position, size in enumerate(own_shape) if size != ONE]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(sorted(dims), count) for count in range(1, len(dims))
    )
    others = [(each, some) for some in subsets for each in alike.get((shape, frozenset(some)), ())]
    mine = _near(values, node) if others else frozenset()
    for other, some in sorted(others, key=lambda pair: values.order[pair[0].name]):
        if mine & _near(values, other):
            return tuple(sorted(kept[position] for position in some))
    return None


def _near(values: Values, node: Node) -> frozenset[str]:
    """Every large value that is read on the way up through pointwise operators and views."""
    found: set[str] = set()
    frontier = list(node.refs())
    while frontier:
        name = frontier.pop()
        if name in found:
            continue
        found.add(name)
        above = values.nodes.get(name)
        if above is not None and (is_pointwise(above) or is_view(above)):
            frontier.extend(above.refs())
    large = max((values.bytes_of(name) for name in found), default=0)
    return frozenset(name for name in found if values.bytes_of(name) * 2 >= large)


def _in_two(values: Values, node: Node, first: tuple[int, ...]) -> list[Node]:
    assert isinstance(node.args[0], Ref) and isinstance(node.args[1], tuple)
    held = values.spec(node.args[0].name)
    left = [position for position in range(len(held.shape)) if position not in first]
    shape = tuple(held.shape[position] for position in left)
    spec = TensorSpec(held.dtype, shape, contiguous_strides(shape), held.device)
    narrow = replace(node, name=f"{node.name}_part", args=(node.args[0], first), spec=spec)
    rest = tuple(left.index(d) for d in node.args[1] if isinstance(d, int) and d not in first)
    return [narrow, replace(node, args=(Ref(narrow.name), rest))]
