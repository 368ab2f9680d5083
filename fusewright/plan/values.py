"""What planning knows of each value of a graph: its kind, its readers, where it lives."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fusewright.ir.graph import Graph, Node, Ref, TensorSpec
from fusewright.ir.operators import SCALAR_OPS
from fusewright.plan.frames import dense_strides
from fusewright.rewrite.layouts import WINDOW
from fusewright.rewrite.matmuls import PRODUCT, halves_of
from fusewright.rewrite.padding import PAD
from fusewright.rewrite.views import is_canonical_view

SOURCES = frozenset({"full", "iota"})


def is_view(node: Node) -> bool:
    return is_canonical_view(node)


def is_reduction(node: Node) -> bool:
    return node.op.startswith("reduce_")


def is_scan(node: Node) -> bool:
    return node.op.startswith("scan_")


def is_pointwise(node: Node) -> bool:
    return node.op in SCALAR_OPS or node.op in SOURCES or node.op == PAD


@dataclass(frozen=True)
class Values:
    """A graph with the look-ups that fusion asks for again and again.

    `realised` are the loop values that live in memory, `memory_views` the views that are taken
    of memory by PyTorch instead of being followed by index arithmetic. `ends` are values that a
    product writes in its own stead, at the end of its epilogue, each with the product.
    `turning`: the target's loops may turn tiles; `sweeping`: its windows also reduce what they
    write; `online`: its loops take log Σ e^x in one sweep, or hold columns, where they would have
    to read again.
    `repeated` are values that backward computes anew, from what is stored; `shared` are those that
    forward and backward both compute.
    """

    graph: Graph
    sizes: Mapping[str, int]
    realised: frozenset[str] = frozenset()
    memory_views: frozenset[str] = frozenset()
    ends: Mapping[str, str] = field(default_factory=dict)
    turning: bool = False
    sweeping: bool = False
    online: bool = False
    repeated: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()

    @cached_property
    def nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def inputs(self) -> dict[str, TensorSpec]:
        return {each.name: each.spec for each in self.graph.inputs}

    @cached_property
    def products(self) -> dict[str, Node]:
        """Matrix products and convolutions of ours."""
        return {node.name: node for node in self.graph.nodes if node.op in (PRODUCT, WINDOW)}

    @cached_property
    def windows(self) -> frozenset[str]:
        return frozenset(name for name, node in self.products.items() if node.op == WINDOW)

    @cached_property
    def padded(self) -> frozenset[str]:
        """Halves of split matrices: their rows lie as far apart as the product wants them."""
        return frozenset(n for each in self.products.values() for n in halves_of(each))

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        return self.graph.users()

    @cached_property
    def random(self) -> tuple[Node, ...]:
        """The operators that draw random numbers or act in another way, in the order they must."""
        return tuple(node for node in self.graph.nodes if node.random or node.effect)

    @cached_property
    def _next_random(self) -> dict[str, Node]:
        return {first.name: second for first, second in itertools.pairwise(self.random)}

    def followers(self, name: str) -> list[Node]:
        """The nodes that must come after this one: its readers, and the next to draw."""
        readers = self.users.get(name, [])
        return [*readers, self._next_random[name]] if name in self._next_random else readers

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(name for name in self.graph.outputs if isinstance(name, str))

    @cached_property
    def order(self) -> dict[str, int]:
        return {node.name: position for position, node in enumerate(self.graph.nodes)}

    def spec(self, name: str) -> TensorSpec:
        """The spec of a value; what a loop stores is dense, but for the halves of a product."""
        found = self._specs.get(name)
        if found is None:
            found = self._specs[name] = self._dense_spec(name)
        return found

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        """Those that `spec` was asked for: fusion does so hundreds of times for each value."""
        return {}

    def _dense_spec(self, name: str) -> TensorSpec:
        if name in self.inputs:
            return self.inputs[name]
        spec = self.nodes[name].spec
        assert spec is not None, name
        if name not in self.padded and self.is_item(name):
            strides = dense_strides(spec.shape, spec.strides)
            return spec if strides == spec.strides else replace(spec, strides=strides)
        return spec

    def reduction_of(self, name: str) -> Node | None:
        """The reduction that gives this value: the node itself, or what a getitem picks from."""
        node = self.nodes.get(name)
        if node is None:
            return None
        if is_reduction(node):
            return node
        if node.op == "getitem" and isinstance(node.args[0], Ref):
            base = self.nodes.get(node.args[0].name)
            return base if base is not None and is_reduction(base) else None
        return None

    def is_item(self, name: str) -> bool:
        """Whether a loop can compute this value."""
        node = self.nodes.get(name)
        if node is None:
            return False
        return is_pointwise(node) or is_scan(node) or self.reduction_of(name) is not None

    def bytes_of(self, name: str) -> int:
        return self.spec(name).bytes_at(self.sizes)

    @cached_property
    def ancestors(self) -> dict[str, frozenset[str]]:
        """For each node, every node it depends on."""
        known: dict[str, frozenset[str]] = {}
        for node in self.graph.nodes:
            found: set[str] = set()
            for name in node.refs():
                if name in known:
                    found.add(name)
                    found |= known[name]
            known[node.name] = frozenset(found)
        return known
