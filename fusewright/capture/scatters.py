"""The gradient of a largest or smallest value, in the joint graph: a choice by the index.

    scatter(x, dim, place, s)[.., i, ..] = s where i = place, else x[.., i, ..]

PyTorch writes zeros first, and then one number of each row; a loop does both, and whatever follows.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fusewright.capture.nodes import Nodes, aten

LOOPS = ("cuda",)
_PLACES = (aten.max.dim, aten.min.dim)
_VIEWS = (aten.unsqueeze.default, aten.detach.default, aten.alias.default)


def with_choices(joint: fx.GraphModule) -> None:
    """Wherever a scatter's index is such a place, and so in range."""
    for node in list(joint.graph.nodes):
        if node.target is aten.scatter.src and _may_loop(node):
            _replace(joint.graph, node)
    joint.recompile()


def _may_loop(node: Any) -> bool:
    into, dim, index, source = node.args
    held = into.meta["val"]
    size = held.shape[dim]
    one = [1 if at == dim % held.dim() else each for at, each in enumerate(held.shape)]
    return (
        _is_place(index)
        and isinstance(size, int)
        and held.device.type in LOOPS
        and all(list(each.meta["val"].shape) == one for each in (index, source))
        and source.meta["val"].dtype == held.dtype
    )


def _is_place(index: Any) -> bool:
    while index.target in _VIEWS:
        index = index.args[0]
    if index.target is not operator.getitem or index.args[1] != 1:
        return False
    return index.args[0].target in _PLACES


def _replace(graph: fx.Graph, node: Any) -> None:
    into, dim, index, source = node.args
    made = Nodes(graph, node)
    with graph.inserting_before(node):
        numbers = made.index_along(into, dim % into.meta["val"].dim())
        here = made.call(aten.eq.Tensor, numbers, index)
        found = made.call(aten.where.self, here, source, into)
    node.replace_all_uses_with(found)
    graph.erase_node(node)
