"""Matmuls of our own on tensor cores, single or batched. In float32 one operand is split:

    m = max |b| over each stored row, finite elements only
    s = fp16_scale(m)                      a power of two: b·s fills float16's range
    hi = float16(b·s), lo = float16(b·s − hi), inverse = 1/s
    mm(b, a) = matmul(a, hi, lo, inverse)

The matrix is split as it is stored in memory, so the matmuls of a backward pass that read it plain
and transposed share one split. The split is a row reduction, fused with the loop that computes b.
In float16 and bfloat16 nothing is split: mm(b, a) = matmul(a, b).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusewright.cost.matmul import is_worthwhile, multiplied_as
from fusewright.ir.graph import (
    HALF_DTYPES,
    ONE,
    Arg,
    Dim,
    Graph,
    Node,
    Ref,
    TensorSpec,
    contiguous_strides,
    product,
)
from fusewright.ir.matmul import Extents
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.lower import main_device
from fusewright.rewrite.views import permute_order
from fusewright.target.target import Target

MATMUL = "matmul"
# TMA needs rows whose distance is a multiple of 16 bytes.
ROW_ELEMENTS = 8
_BARE = ("aten.mm.default", "aten.bmm.default")
_ADDED = ("aten.addmm.default", "aten.baddbmm.default")
MATMULS = (*_BARE, *_ADDED)


def with_matmuls(graph: Graph, sizes: Mapping[str, int], target: Target) -> Graph:
    """The same graph, with our matmuls where they are expected to be faster than PyTorch's.

    They are in float32 and, if the target's `half_matmuls` is set, in 16-bit types.
    """
    building = _Building(Builder(graph.inputs), sizes, main_device(graph), target)
    return building.builder.rewrite(graph, building.rewritten, building.add)


def operands_of(node: Node) -> tuple[str, ...]:
    """The names of a, hi, lo and inverse; or of a and b, which is not split."""
    return tuple(each.name for each in node.args if isinstance(each, Ref))


def split_parts_of(node: Node) -> tuple[str, ...]:
    """The names of hi and lo, if b is split."""
    _, *b = operands_of(node)
    return tuple(b[:2]) if len(b) > 1 else ()


def contracted_dims(node: Node) -> tuple[int, int]:
    """Which dimension of a, and which of b or hi and lo, is summed over; -1 or -2."""
    a, b = node.args[-2:]
    assert isinstance(a, int) and isinstance(b, int)
    return a, b


@dataclass(frozen=True)
class _Matrix:
    """A matrix, or a batch of them, plain or transposed."""

    value: Ref
    transposed: bool


@dataclass
class _Building:
    builder: Builder
    sizes: Mapping[str, int]
    device: str
    target: Target
    nodes: dict[str, Node] = field(default_factory=dict)
    stored_views: dict[str, Ref] = field(default_factory=dict)
    splits: dict[str, tuple[Ref, Ref, Ref]] = field(default_factory=dict)

    def add(self, node: Node) -> Ref:
        made = self.builder.add(node)
        self.nodes[made.name] = replace(node, name=made.name)
        return made

    def rewritten(self, node: Node) -> Ref | None:
        """mm(x, w) = matmul, addmm(bias, x, w) = matmul + bias; None for everything else."""
        if node.op in _BARE:
            return self._matmul(node, node.args[0], node.args[1])
        if node.op in _ADDED and not node.kwargs:
            bias, left, right = node.args
            bare = replace(node, name=f"{node.name}_mm")
            result = self._matmul(bare, left, right)
            if result is not None and node.spec is not None:
                return self.builder.point(node, "add", (result, bias), node.spec.dtype)
        return None

    def _matmul(self, node: Node, left: Arg, right: Arg) -> Ref | None:
        assert isinstance(left, Ref) and isinstance(right, Ref) and node.spec is not None
        if not self._fits(node.spec, left):
            return None
        a, b = self._base(right), self._base(left)
        if not self._has_rows(a):
            return None
        if node.spec.dtype in HALF_DTYPES:
            if not self._has_rows(b):
                return None
            parts: tuple[Ref, ...] = (b.value,)
        else:
            b = self._as_stored(left)
            if not _rows_fit(self._spec(b.value)):
                return None
            parts = self._split(node, b.value)
        dims = (-1 if a.transposed else -2, -2 if b.transposed else -1)
        args: tuple[Arg, ...] = (a.value, *parts, *dims)
        return self.add(Node(node.name, MATMUL, args, (), node.spec, node.source))

    def _has_rows(self, matrix: _Matrix) -> bool:
        """Whether one of a matrix's dimensions is contiguous."""
        return ONE in self._spec(matrix.value).strides[-2:]

    def _spec(self, value: Ref) -> TensorSpec:
        return self.builder.spec(value.name)

    def _fits(self, spec: TensorSpec, left: Ref) -> bool:
        *batches, rows, columns = spec.shape
        wanted = (rows, columns, self._spec(left).shape[-1], product(batches))
        extents = Extents(*(size.at(self.sizes) for size in wanted))
        dtypes = ("float32", *HALF_DTYPES) if self.target.half_matmuls else ("float32",)
        return (
            spec.dtype in dtypes
            and spec.device == self.device
            and spec.strides == contiguous_strides(spec.shape)
            and is_worthwhile(extents, multiplied_as(spec.dtype, self.target), self.target)
        )

    def _base(self, value: Ref) -> _Matrix:
        """Through transposes, to the value that is computed or stored."""
        transposed = False
        node = self.nodes.get(value.name)
        while node is not None and node.op == "aten.permute.default":
            order = permute_order(node)
            straight = tuple(range(len(order)))
            if order[:-2] != straight[:-2]:
                break
            assert isinstance(node.args[0], Ref)
            value = node.args[0]
            transposed ^= order != straight
            node = self.nodes.get(value.name)
        return _Matrix(value, transposed)

    def _as_stored(self, value: Ref) -> _Matrix:
        """`b` with its contiguous dimension last."""
        base = self._base(value)
        spec = self._spec(base.value)
        if spec.strides[-1] == ONE or spec.strides[-2] != ONE:
            return base
        if base.value.name not in self.stored_views:
            *whole, row, column = range(len(spec.shape))
            order = (*whole, column, row)
            shape, strides = (
                tuple(each[at] for at in order) for each in (spec.shape, spec.strides)
            )
            stored = replace(spec, shape=shape, strides=strides)
            args = (base.value, order)
            view = Node(f"{base.value.name}_stored", "aten.permute.default", args, (), stored)
            self.stored_views[base.value.name] = self.add(view)
        return _Matrix(self.stored_views[base.value.name], not base.transposed)

    def _split(self, node: Node, value: Ref) -> tuple[Ref, Ref, Ref]:
        """hi, lo and inverse of a matrix, computed once."""
        if value.name not in self.splits:
            self.splits[value.name] = self._split_parts(node, value)
        return self.splits[value.name]

    def _split_parts(self, node: Node, value: Ref) -> tuple[Ref, Ref, Ref]:
        held, stem = self._spec(value), value.name
        rows, columns = held.shape[:-1], held.shape[-1]
        full = TensorSpec("float32", held.shape, contiguous_strides(held.shape), held.device)
        row = replace(full, shape=rows, strides=contiguous_strides(rows))
        thin = replace(full, shape=(*rows, ONE), strides=contiguous_strides((*rows, ONE)))
        wide = contiguous_strides((*rows, padded(columns)))
        half = replace(full, dtype="float16", strides=wide)
        last = len(rows)

        def made(name: str, op: str, args: tuple[Arg, ...], spec: TensorSpec) -> Ref:
            return self.add(Node(f"{stem}_{name}", op, args, (), spec, node.source))

        size = made("magnitude", "finite_magnitude", (value,), full)
        largest = made("largest", "reduce_max", (size, (last,)), row)
        scale = made("scale", "fp16_scale", (largest,), row)
        column = made("scales", "aten.view.default", (scale, thin.shape), thin)
        scaled = made("scaled", "mul", (value, column), full)
        hi = made("hi", "cast", (scaled,), half)
        near = made("near", "cast", (hi,), full)
        rest = made("rest", "sub", (scaled, near), full)
        lo = made("lo", "cast", (rest,), half)
        return hi, lo, made("inverse", "reciprocal", (scale,), row)


def padded(columns: Dim) -> Dim:
    """The distance between rows: the next multiple of 16 bytes."""
    if columns.factor % ROW_ELEMENTS == 0:
        return columns
    return Dim(-(-columns.factor // ROW_ELEMENTS) * ROW_ELEMENTS)


def _rows_fit(spec: TensorSpec) -> bool:
    """Whether we can write such a distance: it is fixed, or a multiple of 8 at every size."""
    columns = spec.shape[-1]
    return columns.is_static or columns.factor % ROW_ELEMENTS == 0
