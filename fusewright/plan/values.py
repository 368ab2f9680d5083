"""What planning knows about each value of a graph: its kind, its readers, its place in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from fusewright.ir.graph import Dim, Graph, Node, Ref, TensorSpec
from fusewright.ir.operators import SCALAR_OPS
from fusewright.plan.frames import dense_strides
from fusewright.plan.spaces import Space
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


class Role(Enum):
    """How a kernel gets a value."""

    FOLLOWED = "a view, which index arithmetic follows"
    REDUCED = "reduced by the kernel"
    SCANNED = "scanned by the kernel"
    APPLIED = "computed element by element"
    LOADED = "read from memory"


class GraphFacts:
    """What follows from a graph and the example's sizes alone. `Values` that differ in other things
    share it, because fusion tries many of them."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.nodes = {node.name: node for node in graph.nodes}
        self.order = {node.name: position for position, node in enumerate(graph.nodes)}
        self.inputs = {each.name: each.spec for each in graph.inputs}
        self.outputs = frozenset(name for name in graph.outputs if isinstance(name, str))
        self.bytes: dict[str, int] = {}
        self._dense_specs: dict[str, TensorSpec] = {}
        self._spaces: dict[tuple[Dim, ...], Space] = {}

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        return self.graph.users()

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The specs of the graph itself, for nodes with one result."""
        return {name: spec for name, spec in self.graph.specs().items() if spec is not None}

    @cached_property
    def reductions(self) -> dict[str, Node]:
        """The reduction that gives each value: the node itself, or the source of a getitem."""
        found = {}
        for node in self.graph.nodes:
            source = node.args[0] if node.op == "getitem" else None
            base = self.nodes.get(source.name) if isinstance(source, Ref) else node
            if base is not None and is_reduction(base):
                found[node.name] = base
        return found

    @cached_property
    def items(self) -> frozenset[str]:
        """The values that a loop can compute."""
        own = (n.name for n in self.graph.nodes if is_pointwise(n) or is_scan(n))
        return frozenset((*own, *self.reductions))

    @cached_property
    def with_epilogue(self) -> dict[str, Node]:
        return {node.name: node for node in self.graph.nodes if node.op in (MATMUL, CONVOLUTION)}

    @cached_property
    def convolutions(self) -> frozenset[str]:
        return frozenset(n for n, node in self.with_epilogue.items() if node.op == CONVOLUTION)

    @cached_property
    def padded(self) -> frozenset[str]:
        return frozenset(n for each in self.with_epilogue.values() for n in split_parts_of(each))

    @cached_property
    def random(self) -> tuple[Node, ...]:
        return tuple(node for node in self.graph.nodes if node.random or node.effect)

    @cached_property
    def next_random(self) -> dict[str, Node]:
        return {first.name: second for first, second in itertools.pairwise(self.random)}

    def spec(self, name: str) -> TensorSpec:
        found = self._dense_specs.get(name)
        if found is None:
            found = self._dense_specs[name] = self._dense_spec(name)
        return found

    def _dense_spec(self, name: str) -> TensorSpec:
        if name in self.inputs:
            return self.inputs[name]
        spec = self.nodes[name].spec
        assert spec is not None, name
        if name not in self.padded and name in self.items:
            strides = dense_strides(spec.shape, spec.strides)
            return spec if strides == spec.strides else replace(spec, strides=strides)
        return spec

    def space(self, sizes: tuple[Dim, ...]) -> Space:
        found = self._spaces.get(sizes)
        if found is None:
            found = self._spaces[sizes] = Space(sizes, self.spec)
        return found


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
    facts: GraphFacts | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.facts is None or self.facts.graph is not self.graph:
            object.__setattr__(self, "facts", GraphFacts(self.graph, self.sizes))

    @property
    def _facts(self) -> GraphFacts:
        assert self.facts is not None
        return self.facts

    @property
    def nodes(self) -> dict[str, Node]:
        return self._facts.nodes

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        return self._facts.inputs

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The graph's own specs, before a loop's values are made dense."""
        return self._facts.specs

    @property
    def with_epilogue(self) -> dict[str, Node]:
        """Our matmuls and convolutions: the nodes whose kernels have an epilogue."""
        return self._facts.with_epilogue

    @property
    def convolutions(self) -> frozenset[str]:
        return self._facts.convolutions

    @property
    def padded(self) -> frozenset[str]:
        """The fp16 parts of split matrices; the matmul decides the distance between their rows."""
        return self._facts.padded

    @property
    def users(self) -> dict[str, list[Node]]:
        return self._facts.users

    @property
    def random(self) -> tuple[Node, ...]:
        """The operators that draw random numbers or have another effect, in their order."""
        return self._facts.random

    def followers(self, name: str) -> list[Node]:
        """The nodes that must come after this one: its readers, and the next random operator."""
        readers, later = self.users.get(name, []), self._facts.next_random.get(name)
        return readers if later is None else [*readers, later]

    @property
    def outputs(self) -> frozenset[str]:
        return self._facts.outputs

    @property
    def order(self) -> dict[str, int]:
        return self._facts.order

    def spec(self, name: str) -> TensorSpec:
        """The spec of a value; a value that a loop stores is dense, unless it is in `padded`."""
        return self._facts.spec(name)

    def space(self, sizes: tuple[Dim, ...]) -> Space:
        """The index arithmetic over axes of these sizes."""
        return self._facts.space(sizes)

    def reduction_of(self, name: str) -> Node | None:
        """The reduction that gives this value: the node itself, or the source of a getitem."""
        return self._facts.reductions.get(name)

    def is_item(self, name: str) -> bool:
        """Whether a loop can compute this value."""
        return name in self._facts.items

    def role(self, name: str, is_item: bool) -> Role:
        """How a kernel gets a value; `is_item`: the kernel computes it for its own sake."""
        node = self.nodes.get(name)
        if node is None:
            return Role.LOADED
        if is_view(node):
            return Role.LOADED if name in self.memory_views else Role.FOLLOWED
        if is_pointwise(node):
            return Role.APPLIED if is_item or name not in self.realised else Role.LOADED
        if is_item and self.reduction_of(name) is not None:
            return Role.REDUCED
        return Role.SCANNED if is_item and is_scan(node) else Role.LOADED

    def has_spec(self, name: str) -> bool:
        return name in self._facts.specs

    def bytes_of(self, name: str) -> int:
        known = self._facts.bytes
        found = known.get(name)
        if found is None:
            found = known[name] = self.spec(name).bytes_at(self.sizes)
        return found
