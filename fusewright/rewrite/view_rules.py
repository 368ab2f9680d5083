"""Algebra on views, padding and joined tensors. Each rule is one equation that keeps every bit."""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import ONE, Node, Ref
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.context import Context, needs_memory
from fusewright.rewrite.joins import as_padding, joined, rolled
from fusewright.rewrite.numbers import same_number
from fusewright.rewrite.scans import reversed_scan
from fusewright.rewrite.views import permute_order

VIEW, PERMUTE = "aten.view.default", "aten.permute.default"


def view_of_view(context: Context, node: Node) -> Ref | None:
    """view(view(x)) = view(x)"""
    inner = context.producer(node.args[0])
    if inner is None or inner.op != VIEW:
        return None
    assert node.spec is not None and isinstance(inner.args[0], Ref)
    return context.builder.view(node, inner.args[0], node.spec.shape, node.spec.strides)


def permute_of_permute(context: Context, node: Node) -> Ref | None:
    """permute(permute(x, p), q) = permute(x, p∘q), and the identity is x."""
    inner = context.producer(node.args[0])
    if inner is None or inner.op != PERMUTE:
        return None
    first, second = permute_order(inner), permute_order(node)
    order = tuple(first[position] for position in second)
    source = inner.args[0]
    assert isinstance(source, Ref)
    if order == tuple(range(len(order))):
        return source
    return context.builder.add(replace(node, args=(source, order)))


def permute_of_ones(context: Context, node: Node) -> Ref | None:
    """permute(view(x)) = view(permute(x)) if the view only adds dimensions of size one; and a
    permute that only moves such dimensions is a view."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    source = node.args[0]
    shape, order = context.builder.spec(source.name).shape, permute_order(node)
    core = [position for position in range(len(shape)) if shape[position] != ONE]
    moved = [core.index(position) for position in order if position in core]
    if moved == sorted(moved):
        return context.viewed(node, source, node.spec.shape, node.spec.strides)
    inner = _without_ones(context, node, source)
    if inner is None:
        return None
    strides = tuple(node.spec.strides[at] for at, each in enumerate(order) if each in core)
    sizes = tuple(shape[position] for position in order if position in core)
    spec = replace(node.spec, shape=sizes, strides=strides)
    made = context.again(context, replace(node, args=(inner, tuple(moved)), spec=spec))
    return context.builder.view(node, made, node.spec.shape, node.spec.strides)


def _without_ones(context: Context, node: Node, value: Ref) -> Ref | None:
    """A view in memory as one without dimensions of size one, or None."""
    spec, producer = context.builder.spec(value.name), context.producer(value)
    kept = [at for at, size in enumerate(spec.shape) if size != ONE]
    if producer is None or producer.op != VIEW or len(kept) == len(spec.shape):
        return None
    shape, strides = (tuple(each[at] for at in kept) for each in (spec.shape, spec.strides))
    return context.viewed(replace(node, name=f"{node.name}_core"), value, shape, strides)


def view_of_constant(context: Context, node: Node) -> Node | None:
    """A view of equal elements has the same elements."""
    value = context.number(node.args[0])
    return None if value is None else replace(node, op="full", args=(value,), kwargs=())


def padded_constant(context: Context, node: Node) -> Node | None:
    """pad(c, …, c) = c"""
    value, outside = context.number(node.args[0]), node.args[2]
    known = isinstance(value, int | float) and isinstance(outside, int | float)
    if not known or not same_number(value, outside):  # type: ignore[arg-type]
        return None
    return replace(node, op="full", args=(value,))


def scan_from_the_end(context: Context, node: Node) -> Ref | None:
    """flip(scan(flip(x))) = scan(x), from the other end"""
    reversed_ = reversed_scan(node, context.producer)
    return context.builder.add(reversed_) if reversed_ is not None else None


def join_constants(context: Context, node: Node) -> Ref | None:
    """cat(c, x, c) = pad(x, …, c) for a constant c"""
    return as_padding(context.builder, node, context.number)


def join_for_loops(context: Context, node: Node) -> Ref | None:
    """cat(a, b) = a selection by index, if a loop reads it; cat(a) = a."""
    match node.args[0]:
        case (Ref() as single,) if context.builder.spec(single.name) == node.spec:
            return None if needs_memory(context, node, single) else single
    return joined(context.builder, node) if _is_computed_with(context, node) else None


def roll_for_loops(context: Context, node: Node) -> Ref | None:
    """roll(x) = cat(end of x, start of x), if a loop reads it"""
    return rolled(context.builder, node) if _is_computed_with(context, node) else None


def _is_computed_with(context: Context, node: Node) -> bool:
    readers = context.readers(node.name)
    return any(each.op in SCALAR_OPS or each.op.startswith("reduce_") for each in readers)


def reduce_of_reduce(context: Context, node: Node) -> Node | None:
    """Σ over rows of Σ over columns = Σ over both, and so for maxima; sums within rounding"""
    inner, outer = context.producer(node.args[0]), node.args[1]
    wide = node.spec is not None and node.spec.dtype in ("float32", "float64")
    if inner is None or inner.op != node.op or not wide or not context.is_only_reader(node):
        return None
    source, first = inner.args
    assert isinstance(source, Ref) and isinstance(first, tuple) and isinstance(outer, tuple)
    kept = [at for at in range(len(context.builder.spec(source.name).shape)) if at not in first]
    both = (*first, *(kept[at] for at in outer if isinstance(at, int)))
    dims = tuple(sorted(at for at in both if isinstance(at, int)))
    return replace(node, args=(source, dims))
