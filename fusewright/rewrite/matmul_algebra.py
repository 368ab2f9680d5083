"""Matmuls whose result is summed, or whose operand repeats along a dimension, as sums.

    Σ_n (x·w + b)[m, n] = Σ_k x[m, k] · (Σ_n w[k, n]) + Σ_n b[n]
    mm(a, b)[m, n] = a[m] · Σ_k b[k, n]            if a repeats along k; and if b does
    mm(a, b)[m, n] = Σ_k a[k] · b[k, n]            for all m, if a repeats along m; if b along n
    mm(diag(a), b)[m, n] = a[m] · b[m, n]          if b is finite, else NaN; and mm(b, diag(a))
    diagonal(mm(a, b))[m] = Σ_k a[m, k] · b[k, m]

So a linear layer whose outputs are summed or averaged reads its operands once, and so do its
gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fusewright.ir.graph import ONE, Arg, Dim, Node, Ref, TensorSpec, contiguous_strides
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.algebra import Rewriting, Rule
from fusewright.rewrite.product_rules import BMM, MM
from fusewright.rewrite.reductions import reduce
from fusewright.rewrite.view_rules import PERMUTE, VIEW
from fusewright.rewrite.views import permute_order

DIAGONAL_MATRIX, DIAGONAL = "aten.diag_embed.default", "aten.diagonal.default"
_EXPAND, _SUM = "aten.expand.default", "reduce_sum"
_WIDE = ("float32", "float64")
_LINEAR = ("add", "sub", "mul", "div", "neg")


# Sums over the columns of a matmul ----------------------------------------------------------------


def sum_of_columns(state: Rewriting, node: Node) -> Ref | None:
    value, dims = node.args
    assert isinstance(value, Ref) and isinstance(dims, tuple) and node.spec is not None
    last = len(state.spec(value.name).shape) - 1
    if last not in dims or node.spec.dtype not in _WIDE:
        return None
    chain = _Sum(state, node)
    if not chain.has_matmul(value.name):
        return None
    total = chain.of(value.name)
    rest = tuple(at for at in dims if isinstance(at, int) and at != last)
    total = reduce(state.builder, node, "sum", total, rest) if rest else total
    return state.builder.cast(node, total, node.spec.dtype)


@dataclass(frozen=True)
class _Sum:
    """The sum over the last dimension of values that depend on a matmul linearly.

    It is computed in float64: eager adds numbers of which large parts may have cancelled, as in
    `linear(x) - target`, and here the parts are added first, which makes them larger.
    """

    state: Rewriting
    node: Node

    def has_matmul(self, name: str) -> bool:
        """Whether a value is a matmul times and plus others, and nothing else reads it."""
        node, spec = self.state.made.get(name), self.state.graph.specs()[name]
        if node is None or spec is None or not self.state.is_read_once(name):
            return False
        if node.op in (MM, BMM):
            last = spec.shape[-1]
            return spec.dtype in _WIDE and last != ONE and last.is_static
        if node.op == VIEW:
            return _last(self.state, node) and self.has_matmul(_name(node.args[0]))
        if node.op not in _LINEAR or not all(self._fits(arg, spec) for arg in node.args):
            return False
        whole = [arg for arg in node.args if self._is_whole(arg, spec)]
        if node.op in ("add", "sub") and node.args[0] != node.args[1]:
            return any(self.has_matmul(_name(arg)) for arg in whole)
        if node.op == "mul" or (node.op == "div" and whole == [node.args[0]]):
            row = any(self._is_row(arg) for arg in node.args)
            return len(whole) == 1 and not row and self.has_matmul(_name(whole[0]))
        return node.op == "neg" and self.has_matmul(_name(node.args[0]))

    def of(self, name: str) -> Ref:
        node, spec = self.state.made.get(name), self.state.spec(name)
        if node is None or not self.has_matmul(name):
            return self._plain(self.state.now(name))
        if node.op in (MM, BMM):
            return self._matmul(node)
        if node.op == VIEW:
            total, shape = self.of(_name(node.args[0])), spec.shape[:-1]
            return self.state.builder.view(self.node, total, shape, contiguous_strides(shape))
        if node.op == "neg":
            return self._point("neg", self.of(_name(node.args[0])))
        if node.op in ("add", "sub"):
            return self._point(node.op, *(self._term(arg, spec) for arg in node.args))
        parts = (
            self.of(_name(arg)) if self._is_whole(arg, spec) else self._column(arg)
            for arg in node.args
        )
        return self._point(node.op, *parts)

    def _term(self, arg: Arg, spec: TensorSpec) -> Arg:
        """The sum of one operand, which may be a row, a column or a number."""
        if self._is_whole(arg, spec):
            return self.of(_name(arg))
        if self._is_row(arg):
            return self._plain(self.state.now(_name(arg)))
        column, many = self._column(arg), spec.shape[-1].factor
        if isinstance(column, Ref):
            return self._point("mul", column, many)
        assert isinstance(column, int | float)
        return column * many

    def _matmul(self, node: Node) -> Ref:
        left, right = (self.state.now(_name(arg)) for arg in node.args)
        weights = self._plain(right)
        shape = self.state.builder.spec(weights.name).shape
        if node.op == BMM:
            shape = (shape[0], ONE, shape[1])
            weights = self.state.builder.view(self.node, weights, shape, contiguous_strides(shape))
        return self._plain(self._point("mul", self._wide(left), weights))

    def _plain(self, value: Ref) -> Ref:
        value = self._wide(value)
        last = len(self.state.builder.spec(value.name).shape) - 1
        return reduce(self.state.builder, self.node, "sum", value, (last,))

    def _wide(self, value: Ref) -> Ref:
        return self.state.builder.cast(self.node, value, "float64")

    def _column(self, arg: Arg) -> Arg:
        """What is the same for all columns, without their dimension."""
        if not isinstance(arg, Ref):
            return arg
        value = self._wide(self.state.now(arg.name))
        shape = self.state.spec(arg.name).shape
        if not shape:
            return value
        return self.state.builder.view(self.node, value, shape[:-1], contiguous_strides(shape[:-1]))

    def _point(self, op: str, *args: Arg) -> Ref:
        named = replace(self.node, name=f"{self.node.name}_term", spec=None)
        return self.state.builder.point(named, op, args, "float64")

    def _fits(self, arg: Arg, spec: TensorSpec) -> bool:
        """Whether an operand is whole, a row, a column or a number."""
        if not isinstance(arg, Ref):
            return type(arg) in (int, float)
        held = self.state.spec(arg.name)
        column = not held.shape or held.shape[-1] == ONE
        known = column or self._is_whole(arg, spec) or self._is_row(arg)
        return known and held.dtype == spec.dtype and held.device == spec.device

    def _is_whole(self, arg: Arg, spec: TensorSpec) -> bool:
        return isinstance(arg, Ref) and self.state.spec(arg.name).shape == spec.shape

    def _is_row(self, arg: Arg) -> bool:
        """Whether a value is a number for each column, and the same for all rows."""
        if not isinstance(arg, Ref):
            return False
        shape = self.state.spec(arg.name).shape
        return bool(shape) and shape[-1] != ONE and all(each == ONE for each in shape[:-1])


def _last(state: Rewriting, node: Node) -> bool:
    """Whether a view keeps the last dimension."""
    shapes = state.spec(node.name).shape, state.spec(_name(node.args[0])).shape
    return all(len(shape) > 1 for shape in shapes) and shapes[0][-1] == shapes[1][-1]


# Matmuls of operands that repeat ------------------------------------------------------------------


def matmul_of_repeated(state: Rewriting, node: Node) -> Ref | None:
    spec = node.spec
    assert spec is not None
    left, right = (_name(arg) for arg in node.args)
    if spec.dtype not in _WIDE or ONE in (*spec.shape, state.spec(left).shape[1]):
        return None
    for name, other, axis in ((left, right, 1), (right, left, 0)):
        one = thin(state, name, axis)
        if one is not None:  # the same for all terms of a sum
            total = reduce(state.builder, node, "sum", state.now(other), (1 - axis,))
            return _product(state, node, one, total, axis)
    for name, other, axis in ((left, right, 0), (right, left, 1)):
        one = thin(state, name, axis)
        if one is not None:
            return _repeated(state, node, one, state.now(other), axis)
    return None


def _product(state: Rewriting, node: Node, one: Ref, total: Ref, axis: int) -> Ref:
    """A column times a row, of which `one` is the column if `axis` is 1."""
    (size,) = state.builder.spec(total.name).shape
    shape = (ONE, size) if axis else (size, ONE)
    total = state.builder.view(node, total, shape, contiguous_strides(shape))
    assert node.spec is not None
    return state.builder.point(node, "mul", (one, total), node.spec.dtype)


def _repeated(state: Rewriting, node: Node, one: Ref, other: Ref, axis: int) -> Ref:
    """All rows are the same if `axis` is 0, all columns if it is 1."""
    builder, spec = state.builder, node.spec
    assert spec is not None
    (size,) = (n for at, n in enumerate(builder.spec(one.name).shape) if at != axis)
    along = (size, ONE) if axis == 0 else (ONE, size)
    one = builder.view(node, one, along, contiguous_strides(along))
    named = replace(node, name=f"{node.name}_term", spec=None)
    terms = builder.point(named, "mul", (other, one), spec.dtype)
    total = reduce(builder, node, "sum", terms, (axis,))
    return _spread(state, node, total, axis)


def _spread(state: Rewriting, node: Node, total: Ref, axis: int) -> Ref:
    """A row or column for all rows or columns, in memory of its own."""
    builder, spec = state.builder, node.spec
    assert spec is not None
    shape = tuple(ONE if at == axis else n for at, n in enumerate(spec.shape))
    total = builder.view(node, total, shape, contiguous_strides(shape))
    args: tuple[Arg, ...] = (total, spec.shape)
    wide = builder.add(Node(node.name, _EXPAND, args, (), spec, node.source))
    return builder.add(Node(node.name, "cast", (wide,), (), spec, node.source))


_DEEPEST = 32  # operators between a matmul and what repeats


def thin(state: Rewriting, name: str, axis: int) -> Ref | None:
    """A value that repeats along an axis, once; None if it may differ along it."""
    if state.depth == _DEEPEST:
        return None
    if (name, axis) not in state.thin:  # a value that is read twice is looked at once
        state.depth += 1
        state.thin[name, axis] = _thin(state, name, axis)
        state.depth -= 1
    return state.thin[name, axis]


def _thin(state: Rewriting, name: str, axis: int) -> Ref | None:
    node, builder = state.made.get(name), state.builder
    if node is None or node.spec is None:
        return None
    shape = tuple(ONE if at == axis else n for at, n in enumerate(node.spec.shape))
    spec = replace(node.spec, shape=shape, strides=contiguous_strides(shape))
    like = replace(node, name=f"{node.name}_once", spec=spec)
    if node.op == "full":
        return builder.add(like)
    if node.op == _EXPAND:
        return _unexpanded(state, like, _name(node.args[0]), axis - len(shape))
    if node.op == PERMUTE:
        order = permute_order(node)
        inner = thin(state, _name(node.args[0]), order[axis])
        return inner and builder.add(replace(like, args=(inner, order)))
    if node.op == VIEW and axis == len(shape) - 1 and _last(state, node):
        held = len(state.spec(_name(node.args[0])).shape)
        inner = thin(state, _name(node.args[0]), held - 1)
        return inner and builder.view(like, inner, shape, spec.strides)
    if node.op in SCALAR_OPS and node.refs():
        parts = tuple(_thin_operand(state, arg, axis - len(shape)) for arg in node.args)
        if None not in parts:
            return builder.point(like, node.op, parts, spec.dtype)
    return None


def _unexpanded(state: Rewriting, like: Node, source: str, axis: int) -> Ref | None:
    """An expanded value without its expansion along an axis, counted from the end."""
    held, spec = state.spec(source), like.spec
    assert spec is not None
    if len(held.shape) >= -axis and held.shape[axis] != ONE:
        return None
    if held.shape == spec.shape:
        return state.now(source)
    args: tuple[Arg, ...] = (state.now(source), spec.shape)
    return state.builder.add(replace(like, args=args))


def _thin_operand(state: Rewriting, arg: Arg, axis: int) -> Arg:
    """An operand of a pointwise operator; None if it may differ along the axis."""
    if not isinstance(arg, Ref):
        return arg
    shape = state.spec(arg.name).shape
    if len(shape) < -axis or shape[axis] == ONE:
        return state.now(arg.name)
    return thin(state, arg.name, len(shape) + axis)


def sum_of_repeated(state: Rewriting, node: Node) -> Ref | None:
    """Σ_m of a matrix whose columns are all the same, once."""
    value, dims = node.args
    assert node.spec is not None
    if dims != (0,) or len(node.spec.shape) != 1 or node.spec.dtype not in _WIDE:
        return None
    one = thin(state, _name(value), 1) if node.spec.shape != (ONE,) else None
    if one is None:
        return None
    total = reduce(state.builder, node, "sum", one, (0,))
    return _spread(state, node, total, 0)


# Diagonal matrices --------------------------------------------------------------------------------


def matmul_of_diagonal(state: Rewriting, node: Node) -> Ref | None:
    assert node.spec is not None
    for at, other in ((0, 1), (1, 0)):
        found = _diagonal(state, _name(node.args[at]))
        if found is not None:
            (size,) = state.spec(found).shape
            shape = (size, ONE) if at == 0 else (ONE, size)
            scale = state.builder.view(node, state.now(found), shape, contiguous_strides(shape))
            matrix = state.now(_name(node.args[other]))
            scaled = state.builder.point(node, "mul", (matrix, scale), node.spec.dtype)
            return _with_lost(state, node, scaled, matrix, at)
    return None


def _with_lost(state: Rewriting, node: Node, scaled: Ref, matrix: Ref, axis: int) -> Ref:
    """NaN where a zero of the diagonal matrix meets Inf or NaN: 0 · ∞ is no zero."""
    builder, held = state.builder, state.builder.spec(matrix.name)
    if not held.dtype.startswith(("float", "bfloat")):
        return scaled
    like = replace(node, name=f"{node.name}_lost", spec=None)
    parts = tuple(builder.point(like, op, (matrix,), "bool") for op in ("isnan", "isinf"))
    odd = builder.cast(like, builder.point(like, "logical_or", parts, "bool"), "float32")
    shape = tuple(ONE if at == axis else n for at, n in enumerate(held.shape))
    total = reduce(builder, like, "sum", odd, (axis,))
    total = builder.view(like, total, shape, contiguous_strides(shape))
    lost = builder.point(like, "gt", (total, odd), "bool")
    return builder.point(node, "where", (lost, math.nan, scaled), held.dtype)


def _diagonal(state: Rewriting, name: str) -> str | None:
    """The diagonal of a diagonal matrix, which is its own transpose."""
    node = state.made.get(name)
    while node is not None and node.op == PERMUTE:
        node = state.made.get(_name(node.args[0]))
    if node is None or node.op != DIAGONAL_MATRIX or len(node.args) != 1 or node.kwargs:
        return None
    source = _name(node.args[0])
    return source if len(state.spec(source).shape) == 1 else None


def diagonal_of_matmul(state: Rewriting, node: Node) -> Ref | None:
    inner = state.made.get(_name(node.args[0]))
    if node.name in state.given and not state.is_backward:
        return None  # it looks at the product's memory, and so do its strides
    defaults = node.args[1:] in ((), (0, -2, -1), (0, 0, 1)) and not node.kwargs
    if inner is None or inner.op != MM or not defaults or not state.is_read_once(inner.name):
        return None
    assert inner.spec is not None and node.spec is not None
    if inner.spec.shape[0] != inner.spec.shape[1] or inner.spec.dtype not in _WIDE:
        return None
    left, right = (state.now(_name(arg)) for arg in inner.args)
    shape, strides = (each[::-1] for each in _layout(state.builder.spec(right.name)))
    turned = TensorSpec(node.spec.dtype, shape, strides, node.spec.device)
    args: tuple[Arg, ...] = (right, (1, 0))
    right = state.builder.add(Node(f"{node.name}_t", PERMUTE, args, (), turned, node.source))
    named = replace(node, name=f"{node.name}_term", spec=None)
    terms = state.builder.point(named, "mul", (left, right), node.spec.dtype)
    return reduce(state.builder, node, "sum", terms, (1,))


def _layout(spec: TensorSpec) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    return spec.shape, spec.strides


def _name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


RULES = (
    Rule("a sum over a matmul's columns is a matmul with summed weights", (_SUM,), sum_of_columns),
    Rule("a matmul with a diagonal matrix is a product", (MM,), matmul_of_diagonal),
    Rule("the diagonal of a matmul is a sum for each row", (DIAGONAL,), diagonal_of_matmul),
    Rule("a matmul whose operand repeats is a sum", (MM,), matmul_of_repeated),
    Rule("a sum of equal columns is taken once", (_SUM,), sum_of_repeated),
)
