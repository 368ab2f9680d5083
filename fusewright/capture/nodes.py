"""Nodes that we insert into a traced graph, each with its fake value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


class Nodes:
    """Makes nodes that replace `node` and keep its source line."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        held = fx.map_arg(args, lambda each: each.meta["val"])
        return self.known(op(*held, **kwargs), op, *args, **kwargs)

    def known(self, value: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call whose value is given, because the operator cannot run on fakes."""
        made = self.graph.call_function(op, args, kwargs)
        made.meta = {**self.node.meta, "val": value}
        return made

    def index_along(self, like: fx.Node, dim: int) -> fx.Node:
        """0, 1, … along a dimension as int32, to compare with indices."""
        held = like.meta["val"]
        kind: Any = {"dtype": torch.int32, "device": held.device}
        index = self.call(aten.arange.start_step, 0, held.shape[dim], 1, **kind)
        return self.along(like, dim, index)

    def as_int32(self, indices: fx.Node) -> fx.Node:
        """Indices as int32."""
        return self.call(aten._to_copy.default, indices, dtype=torch.int32)

    def along(self, like: fx.Node, dim: int, vector: fx.Node) -> fx.Node:
        """A vector, shaped to broadcast along a dimension of `like`."""
        ones = [1] * (like.meta["val"].dim() - 1 - dim)
        return self.call(aten.view.default, vector, [-1, *ones])
