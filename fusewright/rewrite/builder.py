"""A graph under construction, to which the rewriting steps append.

Each step reads one frozen graph and builds the next one here, node by node; `substitute` records
the new name of an old value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusewright.ir.graph import (
    ONE,
    Arg,
    Dim,
    Graph,
    Input,
    Node,
    Ref,
    TensorSpec,
    contiguous_strides,
    validate,
)
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.normal_form import Known, broadcast, normal


class Builder:
    def __init__(self, inputs: tuple[Input, ...]) -> None:
        self.inputs = inputs
        self.nodes: list[Node] = []
        self.specs: dict[str, TensorSpec | None] = {each.name: each.spec for each in inputs}
        self.names: dict[str, str] = {}
        self.known = Known(self.specs)

    def spec(self, name: str) -> TensorSpec:
        spec = self.specs[name]
        assert spec is not None, f"{name} has several results"
        return spec

    def add(self, node: Node) -> Ref:
        """Append a node; a name that is taken gets a number."""
        name, count = node.name, 0
        while name in self.specs:
            count += 1
            name = f"{node.name}_{count}"
        if name != node.name:
            node = replace(node, name=name)
        self.nodes.append(node)
        self.specs[name] = node.spec
        self.known.note(node)
        return Ref(name)

    def put(self, node: Node) -> Ref:
        """Append a node; a scalar operator in its normal form."""
        scalar = node.op in SCALAR_OPS and node.spec is not None
        return self.add(normal(node, self.known) if scalar else node)

    def substitute(self, old: str, new: Ref) -> None:
        self.names[old] = new.name

    def resolved(self, node: Node) -> Node:
        """`node` of the old graph, reading values of the new one."""
        return node.renamed(self.names)

    def graph(self, outputs: tuple[str | Dim | None, ...]) -> Graph:
        renamed = tuple(
            self.names.get(each, each) if isinstance(each, str) else each for each in outputs
        )
        return Graph(self.inputs, tuple(self.nodes), renamed).pruned()

    # Canonical nodes -------------------------------------------------------------------------

    def rewrite(
        self, graph: Graph, rewritten: Callable[[Node], Ref | None], add: Callable[[Node], Ref]
    ) -> Graph:
        """`graph` with what `rewritten` makes of its nodes; where that is None, `add` keeps one."""
        for node in graph.nodes:
            known = self.resolved(node)
            made = rewritten(known)
            self.substitute(node.name, made if made is not None else add(known))
        result = self.graph(graph.outputs)
        validate(result)
        return result

    def point(self, like: Node, op: str, args: tuple[Arg, ...], dtype: str) -> Ref:
        """A scalar operator over broadcast operands."""
        shapes = [self.spec(arg.name).shape for arg in args if isinstance(arg, Ref)]
        device = next((self.spec(arg.name).device for arg in args if isinstance(arg, Ref)), "cpu")
        if like.spec is not None:
            device = like.spec.device
        shape = broadcast(shapes)
        spec = TensorSpec(dtype, shape, contiguous_strides(shape), device)
        if like.spec is not None and like.spec.shape == shape:
            spec = TensorSpec(dtype, shape, like.spec.strides, device)
        return self.put(Node(like.name, op, args, (), spec, like.source))

    def plus_channels(self, like: Node, value: Ref, bias: Ref) -> Ref:
        """`value` plus the element of `bias` for each channel."""
        assert like.spec is not None
        shape = (*self.spec(bias.name).shape, *(ONE for _ in like.spec.shape[2:]))
        named = replace(like, name=f"{like.name}_bias")
        per_channel = self.view(named, bias, shape, contiguous_strides(shape))
        return self.point(like, "add", (value, per_channel), like.spec.dtype)

    def cast(self, like: Node, value: Ref, dtype: str) -> Ref:
        if self.spec(value.name).dtype == dtype:
            return value
        held = self.spec(value.name)
        spec = TensorSpec(dtype, held.shape, held.strides, held.device)
        return self.put(Node(f"{value.name}_{dtype}", "cast", (value,), (), spec, like.source))

    def view(self, like: Node, value: Ref, shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> Ref:
        """The same elements in row-major order under another shape."""
        held = self.spec(value.name)
        if held.shape == shape:
            return value
        spec = TensorSpec(held.dtype, shape, strides, held.device)
        return self.add(Node(like.name, "aten.view.default", (value, shape), (), spec, like.source))

    def index_along(
        self, like: Node, numbers: tuple[int, int], axis: int, dtype: str = "int32"
    ) -> Ref:
        """start, start + step, … along an axis of `like`, counted from its end, as integers."""
        assert like.spec is not None and axis < 0
        size = like.spec.shape[axis]
        spec = TensorSpec(dtype, (size,), (ONE,), like.spec.device)
        index = Node(f"{like.name}_index", "iota", numbers, (), spec, like.source)
        shape = (size, *(ONE for _ in range(-1 - axis)))
        return self.view(index, self.add(index), shape, contiguous_strides(shape))
