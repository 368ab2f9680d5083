"""Nodes that are put into a traced graph, each with what it would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


class Nodes:
    """Those that take the place of `node`, and come of the same line of the model."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        held = fx.map_arg(args, lambda each: each.meta["val"])
        return self.known(op(*held, **kwargs), op, *args, **kwargs)

    def known(self, value: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of what cannot be asked for its value."""
        made = self.graph.call_function(op, args, kwargs)
        made.meta = {**self.node.meta, "val": value}
        return made

    def index_along(self, like: fx.Node, dim: int) -> fx.Node:
        """0, 1, … along a dimension, to compare places with that are as short."""
        held = like.meta["val"]
        kind: Any = {"dtype": torch.int32, "device": held.device}
        numbers = self.call(aten.arange.start_step, 0, held.shape[dim], 1, **kind)
        return self.along(like, dim, numbers)

    def as_short(self, places: fx.Node) -> fx.Node:
        """Places as numbers of 32 bits."""
        return self.call(aten._to_copy.default, places, dtype=torch.int32)

    def along(self, like: fx.Node, dim: int, numbers: fx.Node) -> fx.Node:
        """Numbers that lie along a dimension of `like`."""
        ones = [1] * (like.meta["val"].dim() - 1 - dim)
        return self.call(aten.view.default, numbers, [-1, *ones])
