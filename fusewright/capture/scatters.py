"""The gradient of max or min along a dimension, in the joint graph.

    scatter(x, dim, index, s)[.., i, ..] = s where i = index, else x[.., i, ..]

PyTorch writes zeros, then one element of each row. Along contiguous rows on a GPU, a loop does both
and fuses with what follows. Along columns, every element would read its index and value again;
there, and on the host, one PyTorch operator does both. The traced graph would also copy the zeros
before it writes into them.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fusewright.capture.nodes import Nodes, aten

LOOPS = ("cuda",)  # devices where a loop is faster than PyTorch's two steps
_ARG_EXTREMES = (aten.max.dim, aten.min.dim)
_VIEWS = (aten.unsqueeze.default, aten.detach.default, aten.alias.default)


def with_choices(joint: fx.GraphModule) -> None:
    """Replace each scatter whose index comes from max or min."""
    for node in list(joint.graph.nodes):
        if node.target is aten.scatter.src and _is_one_each(node) and _is_in_range(node):
            _replace(joint.graph, node)
    joint.recompile()


def _is_in_range(node: Any) -> bool:
    """Whether the index comes from max or min of a tensor of the same shape."""
    into, _, index, _ = node.args
    while index.target in _VIEWS:
        index = index.args[0]
    if index.target is not operator.getitem or index.args[1] != 1:
        return False
    found = index.args[0]
    same = (
        found.target in _ARG_EXTREMES and found.args[0].meta["val"].shape == into.meta["val"].shape
    )
    return bool(same)


def _is_one_each(node: Any) -> bool:
    """Whether each row has one index and one value."""
    into, dim, index, source = node.args
    held = into.meta["val"]
    if not held.dim():
        return False
    one = [1 if at == dim % held.dim() else each for at, each in enumerate(held.shape)]
    same = source.meta["val"].dtype == held.dtype
    shapes = (list(each.meta["val"].shape) for each in (index, source))
    return same and all(each == one for each in shapes)


def _replace(graph: fx.Graph, node: Any) -> None:
    into, dim, index, source = node.args
    held, made = into.meta["val"], Nodes(graph, node)
    size = held.shape[dim]
    with graph.inserting_before(node):
        along_rows = held.stride(dim) == 1 and held.device.type in LOOPS
        if along_rows and isinstance(size, int) and size < 2**31:
            along = made.index_along(into, dim % held.dim())
            here = made.call(aten.eq.Tensor, along, made.as_int32(index))
            found = made.call(aten.where.self, here, source, into)
        elif into.target is aten.full.default and into.args[1] == 0:
            given = (source, dim, index, into.args[0], True)
            op = aten.value_selecting_reduction_backward.default
            found = made.known(node.meta["val"], op, *given)
        else:
            return
    node.replace_all_uses_with(found)
    graph.erase_node(node)
