"""What planning knows about each value of a graph: its kind, its readers, its place in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fusewright.ir.graph import Graph, Node, Ref, TensorSpec
from fusewright.ir.operators import SCALAR_OPS
from fusewright.plan.frames import dense_strides
from fusewright.rewrite.layouts import CONVOLUTION
from fusewright.rewrite.matmuls import MATMUL, split_parts_of
from fusewright.rewrite.padding import PAD
from fusewright.rewrite.views import is_canonical_view
from fusewright.target.target import Target

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
    """A graph with the look-ups that fusion needs again and again.

    `realised` are the loop values that are in memory. `memory_views` are the views that PyTorch
    takes of memory; index arithmetic follows the others. `ends` maps a value at the end of an
    epilogue to the matmul or convolution that writes it instead of its own result. `repeated` are
    values that backward computes again from stored ones; `shared` are values that forward and
    backward both compute.
    """

    graph: Graph
    sizes: Mapping[str, int]
    target: Target
    realised: frozenset[str] = frozenset()
    memory_views: frozenset[str] = frozenset()
    ends: Mapping[str, str] = field(default_factory=dict)
    repeated: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()

    @cached_property
    def nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def inputs(self) -> dict[str, TensorSpec]:
        return {each.name: each.spec for each in self.graph.inputs}

    @cached_property
    def with_epilogue(self) -> dict[str, Node]:
        """Our matmuls and convolutions: the nodes whose kernels have an epilogue."""
        return {node.name: node for node in self.graph.nodes if node.op in (MATMUL, CONVOLUTION)}

    @cached_property
    def convolutions(self) -> frozenset[str]:
        return frozenset(n for n, node in self.with_epilogue.items() if node.op == CONVOLUTION)

    @cached_property
    def padded(self) -> frozenset[str]:
        """The fp16 parts of split matrices; the matmul decides the distance between their rows."""
        return frozenset(n for each in self.with_epilogue.values() for n in split_parts_of(each))

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        return self.graph.users()

    @cached_property
    def random(self) -> tuple[Node, ...]:
        """The operators that draw random numbers or have another effect, in their order."""
        return tuple(node for node in self.graph.nodes if node.random or node.effect)

    @cached_property
    def _next_random(self) -> dict[str, Node]:
        return {first.name: second for first, second in itertools.pairwise(self.random)}

    def followers(self, name: str) -> list[Node]:
        """The nodes that must come after this one: its readers, and the next random operator."""
        readers = self.users.get(name, [])
        return [*readers, self._next_random[name]] if name in self._next_random else readers

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(name for name in self.graph.outputs if isinstance(name, str))

    @cached_property
    def order(self) -> dict[str, int]:
        return {node.name: position for position, node in enumerate(self.graph.nodes)}

    def spec(self, name: str) -> TensorSpec:
        """The spec of a value; a value that a loop stores is dense, unless it is in `padded`."""
        found = self._specs.get(name)
        if found is None:
            found = self._specs[name] = self._dense_spec(name)
        return found

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        """The specs so far: fusion asks for each of them hundreds of times."""
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
        """The reduction that gives this value: the node itself, or the source of a getitem."""
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

    def has_spec(self, name: str) -> bool:
        return name in self.inputs or (name in self.nodes and self.nodes[name].spec is not None)

    def bytes_of(self, name: str) -> int:
        return self.spec(name).bytes_at(self.sizes)
