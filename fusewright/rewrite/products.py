"""Float32 matrix products for tensor cores: one operand is split into halves, by a loop of ours.

    m = max |b| over each stored row, of what is finite
    s = half_scale(m)                      a power of two: b·s fills float16's range
    hi = float16(b·s), lo = float16(b·s − hi), inverse = 1/s
    mm(b, a) = product(a, hi, lo, inverse)

The split is taken of the matrix as it lies in memory, so the products of a backward pass that
read it straight and transposed share one. It is a row reduction, fused with whatever makes b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusewright.ir import (
    ONE,
    Arg,
    Dim,
    Graph,
    Node,
    Ref,
    TensorSpec,
    contiguous_strides,
    validate,
)
from fusewright.product_cost import is_worthwhile
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.lower import main_device
from fusewright.rewrite.views import permute_order

PRODUCT = "product"
# TMA wants rows that are multiples of 16 bytes apart.
ROW_ELEMENTS = 8


def with_products(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The same graph, its large float32 matrix products as `product` nodes."""
    building = _Building(Builder(graph.inputs), sizes, main_device(graph))
    builder = building.builder
    for node in graph.nodes:
        known = builder.resolved(node)
        result = building.rewritten(known)
        builder.substitute(node.name, result if result is not None else building.add(known))
    made = builder.graph(graph.outputs)
    validate(made)
    return made


def operands_of(product: Node) -> tuple[str, str, str, str]:
    """The names of a, hi, lo and inverse."""
    a, hi, lo, inverse = product.refs()
    return a, hi, lo, inverse


def contracted_dims(product: Node) -> tuple[int, int]:
    """Which dimension of a, and which of hi and lo, is summed over."""
    a, b = product.args[4:]
    assert isinstance(a, int) and isinstance(b, int)
    return a, b


@dataclass(frozen=True)
class _Matrix:
    """A value of two dimensions, seen straight or transposed."""

    value: Ref
    transposed: bool


@dataclass
class _Building:
    builder: Builder
    sizes: Mapping[str, int]
    device: str
    nodes: dict[str, Node] = field(default_factory=dict)
    turned: dict[str, Ref] = field(default_factory=dict)
    splits: dict[str, tuple[Ref, Ref, Ref]] = field(default_factory=dict)

    def add(self, node: Node) -> Ref:
        made = self.builder.add(node)
        self.nodes[made.name] = replace(node, name=made.name)
        return made

    def rewritten(self, node: Node) -> Ref | None:
        """mm(x, w) = product, addmm(bias, x, w) = product + bias; None for everything else."""
        if node.op == "aten.mm.default":
            return self._product(node, node.args[0], node.args[1])
        if node.op == "aten.addmm.default" and not node.kwargs:
            bias, left, right = node.args
            bare = replace(node, name=f"{node.name}_mm")
            result = self._product(bare, left, right)
            if result is not None and node.spec is not None:
                return self.builder.point(node, "add", (result, bias), node.spec.dtype)
        return None

    def _product(self, node: Node, left: Arg, right: Arg) -> Ref | None:
        assert isinstance(left, Ref) and isinstance(right, Ref) and node.spec is not None
        if not self._fits(node.spec, left):
            return None
        b, a = self._as_stored(left), self._base(right)
        if not _rows_fit(self._spec(b.value)) or ONE not in self._spec(a.value).strides:
            return None
        hi, lo, inverse = self._split(node, b.value)
        dims = (1 if a.transposed else 0, 0 if b.transposed else 1)
        args = (a.value, hi, lo, inverse, *dims)
        return self.add(Node(node.name, PRODUCT, args, (), node.spec, node.source))

    def _spec(self, value: Ref) -> TensorSpec:
        return self.builder.spec(value.name)

    def _fits(self, spec: TensorSpec, left: Ref) -> bool:
        rows, columns = (size.at(self.sizes) for size in spec.shape)
        contracted = self._spec(left).shape[1].at(self.sizes)
        return (
            spec.dtype == "float32"
            and spec.device == self.device
            and spec.strides == contiguous_strides(spec.shape)
            and is_worthwhile(rows, columns, contracted)
        )

    def _base(self, value: Ref) -> _Matrix:
        """Through transposes, to what is computed or lies in memory."""
        transposed = False
        node = self.nodes.get(value.name)
        while node is not None and node.op == "aten.permute.default":
            assert isinstance(node.args[0], Ref)
            value = node.args[0]
            transposed ^= permute_order(node) == (1, 0)
            node = self.nodes.get(value.name)
        return _Matrix(value, transposed)

    def _as_stored(self, value: Ref) -> _Matrix:
        """`b` with its contiguous dimension last."""
        base = self._base(value)
        spec = self._spec(base.value)
        if spec.strides[1] == ONE or spec.strides[0] != ONE:
            return base
        if base.value.name not in self.turned:
            turned = replace(spec, shape=spec.shape[::-1], strides=spec.strides[::-1])
            args = (base.value, (1, 0))
            view = Node(f"{base.value.name}_stored", "aten.permute.default", args, (), turned)
            self.turned[base.value.name] = self.add(view)
        return _Matrix(self.turned[base.value.name], not base.transposed)

    def _split(self, node: Node, value: Ref) -> tuple[Ref, Ref, Ref]:
        """hi, lo and inverse of a matrix, made once."""
        if value.name not in self.splits:
            self.splits[value.name] = self._halves(node, value)
        return self.splits[value.name]

    def _halves(self, node: Node, value: Ref) -> tuple[Ref, Ref, Ref]:
        held, stem = self._spec(value), value.name
        rows, columns = held.shape
        full = TensorSpec("float32", held.shape, contiguous_strides(held.shape), held.device)
        row = replace(full, shape=(rows,), strides=(ONE,))
        thin = replace(full, shape=(rows, ONE), strides=(ONE, ONE))
        half = replace(full, dtype="float16", strides=(padded(columns), ONE))

        def made(name: str, op: str, args: tuple[Arg, ...], spec: TensorSpec) -> Ref:
            return self.add(Node(f"{stem}_{name}", op, args, (), spec, node.source))

        size = made("magnitude", "finite_magnitude", (value,), full)
        largest = made("largest", "reduce_max", (size, (1,)), row)
        scale = made("scale", "half_scale", (largest,), row)
        column = made("scales", "aten.view.default", (scale, thin.shape), thin)
        scaled = made("scaled", "mul", (value, column), full)
        hi = made("hi", "cast", (scaled,), half)
        near = made("near", "cast", (hi,), full)
        rest = made("rest", "sub", (scaled, near), full)
        lo = made("lo", "cast", (rest,), half)
        return hi, lo, made("inverse", "reciprocal", (scale,), row)


def padded(columns: Dim) -> Dim:
    """The distance of rows: the next multiple of 16 bytes."""
    if columns.factor % ROW_ELEMENTS == 0:
        return columns
    return Dim(-(-columns.factor // ROW_ELEMENTS) * ROW_ELEMENTS)


def _rows_fit(spec: TensorSpec) -> bool:
    """Whether such a distance can be written: a number, or a multiple of 8 for every size."""
    columns = spec.shape[1]
    return columns.is_static or columns.factor % ROW_ELEMENTS == 0
