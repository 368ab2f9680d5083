"""Equal nodes of a joint graph become one, as in PyTorch's partitioner, without its compiler.

PyTorch's function asks whether a node changes a tensor in place. For that it loads a part of
Inductor with all its templates, which takes 0.9 s of processor time in each process. A joint graph
is functional: nearly always there is nothing to ask. If there is, PyTorch's own function runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import partitioners
from torch._functorch.compile_utils import get_aten_target, rand_ops
from torch.multiprocessing.reductions import StorageWeakRef

_SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool
_NAME = "fx_graph_cse"
_KEPT = ("placeholder", "output", "get_attr")
_OF_NUMBERS = (operator.add.__module__, math.ceil.__module__)  # the modules of their functions


@contextlib.contextmanager
def merging_lightly() -> Iterator[None]:
    """The partitioner merges equal nodes with `merged` while the block runs."""
    plain = vars(partitioners)[_NAME]
    with patch.object(partitioners, _NAME, functools.partial(merged, plain=plain)):
        yield


def merged(
    graph: fx.Graph,
    extra_node_key: Callable[[fx.Node], Hashable] | None = None,
    *,
    plain: Callable[..., fx.Graph],
) -> fx.Graph:
    """A copy of the graph with each computation once; `plain` is PyTorch's own function.

    Random operators, memory without contents, and values that share memory with outputs stay.
    PyTorch 2.15 passes `extra_node_key`: nodes are equal only if it says the same of both.
    """
    if not all(map(_is_functional, graph.nodes)):
        return plain(graph) if extra_node_key is None else plain(graph, extra_node_key)
    returned = {_storage(each) for each in graph.output_node().all_input_nodes} - {None}
    made, known = fx.Graph(), dict[Any, fx.Node]()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        target = get_aten_target(node)
        alone = node.op in _KEPT or target in rand_ops or target is torch.ops.aten.empty
        if alone or _storage(node) in returned:
            copies[node] = made.node_copy(node, copies.__getitem__)
            continue
        context = None if extra_node_key is None else extra_node_key(node)
        key = node.target, context, _key(node.args, copies), _key(node.kwargs, copies)
        if key not in known:
            known[key] = made.node_copy(node, copies.__getitem__)
        copies[node] = known[key]
    return made


def _is_functional(node: fx.Node) -> bool:
    """Whether a node is known to change nothing."""
    if node.op in _KEPT or getattr(node.target, "__module__", "") in _OF_NUMBERS:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable


def _storage(node: fx.Node) -> StorageWeakRef | None:
    """The memory of a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
    except NotImplementedError:  # a tensor without memory of its own, such as a sparse one
        return None


def _key(value: Any, copies: Mapping[fx.Node, fx.Node]) -> Any:
    """Equal for equal arguments. 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return copies[value]
    if isinstance(value, list | tuple):
        return type(value), *(_key(each, copies) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(each, copies)) for name, each in value.items())
    if isinstance(value, _SYMBOLIC):
        return value.node
    if isinstance(value, float | complex):
        return type(value), repr(value)
    return type(value), value
