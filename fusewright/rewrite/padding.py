"""Padding with a constant: `pad(x, ((before, after), …), value)`, a pair for each dimension.

    pad(x)[.., i, ..] = x[.., i - before, ..] if that element exists, else value

Negative numbers crop. A loop reads x at the shifted index, guarded, so padding fuses with its
reader and with its operand. Every padded dimension has a fixed size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusewright.ir.graph import FLOATS, ONE, Arg, Dim, Node, Ref, TensorSpec, contiguous_strides
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.numbers import in_kind

PAD = "pad"
LARGEST_SIZE = 2**30  # padding compares 32-bit indices

Pairs = tuple[tuple[int, int], ...]


def pad_parts(node: Node) -> Pairs:
    """How many elements are added before and after, along each dimension."""
    pairs = node.args[1]
    assert isinstance(pairs, tuple)
    return tuple(_pair(each) for each in pairs)


def _pair(arg: Arg) -> tuple[int, int]:
    assert isinstance(arg, tuple)
    before, after = arg
    assert isinstance(before, int) and isinstance(after, int)
    return before, after


def pad_value(node: Node) -> int | float | bool:
    value = node.args[2]
    assert isinstance(value, int | float)
    return value


def padded(
    builder: Builder, like: Node, value: Ref, pairs: Pairs, outside: int | float | bool
) -> Ref | None:
    """The node, or the value itself if nothing is added; None if a size cannot be padded."""
    held = builder.spec(value.name)
    shape: list[Dim] = []
    for size, (before, after) in zip(held.shape, pairs, strict=True):
        if (before, after) == (0, 0):
            shape.append(size)
            continue
        large = max(size.factor, size.factor + before + after, abs(before), abs(after))
        if not size.is_static or large > LARGEST_SIZE:
            return None
        shape.append(Dim(size.factor + before + after))
    if not any(pair != (0, 0) for pair in pairs):
        return value
    strides = contiguous_strides(tuple(shape))
    if like.spec is not None and like.spec.shape == tuple(shape):
        strides = like.spec.strides
    spec = TensorSpec(held.dtype, tuple(shape), strides, held.device)
    outside = in_kind(outside, held.dtype)
    return builder.add(Node(like.name, PAD, (value, pairs, outside), (), spec, like.source))


def lower_pad(builder: Builder, node: Node) -> Ref | None:
    """aten.constant_pad_nd, whose pairs start with the last dimension."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    numbers, outside = node.argument("pad", 1), node.argument("value", 2, 0)
    if not isinstance(numbers, tuple) or not isinstance(outside, int | float):
        return None
    given = [each for each in numbers if isinstance(each, int)]
    whole = isinstance(outside, int) or outside == outside // 1
    if len(given) != len(numbers) or not (whole or node.spec.dtype in FLOATS):
        return None
    rank = len(node.spec.shape)
    last_first = list(zip(given[::2], given[1::2], strict=True))
    pairs = ((0, 0),) * (rank - len(last_first)) + tuple(reversed(last_first))
    made = padded(builder, node, node.args[0], pairs, outside)
    if made == node.args[0]:  # a result needs memory of its own
        return builder.point(node, "cast", (made,), node.spec.dtype)
    return made


def lower_slice_gradient(builder: Builder, node: Node) -> Ref | None:
    """slice_backward(g) = g, padded with zeros; every second element and so on stays PyTorch's."""
    grad, _, dim, start, _, step = node.args
    assert node.spec is not None and isinstance(grad, Ref) and isinstance(dim, int)
    held, at = builder.spec(grad.name).shape, dim % len(node.spec.shape)
    if held == node.spec.shape:
        return grad
    size = node.spec.shape[at]
    fixed = size.is_static and held[at].is_static and isinstance(start, int) and step == 1
    if not fixed:
        return None
    assert isinstance(start, int)
    first = min(max(start + size.factor if start < 0 else start, 0), size.factor)
    return _within(builder, node, grad, at, first)


def lower_select_gradient(builder: Builder, node: Node) -> Ref | None:
    """select_backward(g) = g with its dimension, padded with zeros"""
    grad, _, dim, index = node.args
    assert node.spec is not None and isinstance(grad, Ref) and isinstance(dim, int)
    at = dim % len(node.spec.shape)
    size = node.spec.shape[at]
    if not size.is_static or not isinstance(index, int):
        return None
    shape = tuple(ONE if d == at else each for d, each in enumerate(node.spec.shape))
    named = replace(node, name=f"{node.name}_one")
    value = builder.view(named, grad, shape, contiguous_strides(shape))
    return _within(builder, node, value, at, index % size.factor)


def _within(builder: Builder, node: Node, value: Ref, at: int, first: int) -> Ref | None:
    """Zeros around a value, along one dimension."""
    assert node.spec is not None
    size, held = node.spec.shape[at].factor, builder.spec(value.name).shape[at].factor
    pairs = tuple(
        (first, size - first - held) if d == at else (0, 0) for d in range(len(node.spec.shape))
    )
    return padded(builder, node, value, pairs, 0)


PADS: dict[str, Callable[[Builder, Node], Ref | None]] = {
    "aten.constant_pad_nd.default": lower_pad,
    "aten.slice_backward.default": lower_slice_gradient,
    "aten.select_backward.default": lower_select_gradient,
}
