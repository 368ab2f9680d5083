"""The gradient of a largest or smallest value, in the joint graph.

    scatter(x, dim, place, s)[.., i, ..] = s where i = place, else x[.., i, ..]

PyTorch writes zeros first, and then one number of each row; along rows of a GPU a loop does both,
and what follows. Along columns each element would read its place and number again: there, and on
the host, it is PyTorch's operator for both. The traced graph would copy the zeros before it writes
to them.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fusewright.capture.nodes import Nodes, aten

LOOPS = ("cuda",)  # devices where a loop is faster than both of PyTorch's passes
_PLACES = (aten.max.dim, aten.min.dim)
_VIEWS = (aten.unsqueeze.default, aten.detach.default, aten.alias.default)


def with_choices(joint: fx.GraphModule) -> None:
    """Wherever a scatter's index is such a place."""
    for node in list(joint.graph.nodes):
        if node.target is aten.scatter.src and _is_one_each(node) and _is_in_range(node):
            _replace(joint.graph, node)
    joint.recompile()


def _is_in_range(node: Any) -> bool:
    """Whether the index is a place in a tensor of the same shape."""
    into, _, index, _ = node.args
    while index.target in _VIEWS:
        index = index.args[0]
    if index.target is not operator.getitem or index.args[1] != 1:
        return False
    found = index.args[0]
    same = found.target in _PLACES and found.args[0].meta["val"].shape == into.meta["val"].shape
    return bool(same)


def _is_one_each(node: Any) -> bool:
    """Whether each row has one place and one number."""
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
            numbers = made.index_along(into, dim % held.dim())
            here = made.call(aten.eq.Tensor, numbers, made.as_short(index))
            found = made.call(aten.where.self, here, source, into)
        elif into.target is aten.full.default and into.args[1] == 0:
            given = (source, dim, index, into.args[0], True)
            op = aten.value_selecting_reduction_backward.default
            found = made.known(node.meta["val"], op, *given)
        else:
            return
    node.replace_all_uses_with(found)
    graph.erase_node(node)
