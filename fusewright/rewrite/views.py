"""Every view in terms of four operators: view, permute, expand and slice.

view keeps the row-major order of the elements under another shape; permute reorders dimensions;
expand repeats along dimensions of size one; slice takes every step-th index from a start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusewright.ir.graph import ONE, Arg, Node, Ref, TensorSpec, contiguous_strides
from fusewright.rewrite.builder import Builder

# Aliases that we do not model; they stay PyTorch's, and launch nothing.
OPAQUE_VIEWS = frozenset(
    {
        "aten.as_strided.default",
        "aten.diagonal.default",
        "aten.unfold.default",
        "aten.view_as_real.default",
        "aten.view_as_complex.default",
        "aten.view.dtype",
        "aten.real.default",
        "aten.imag.default",
    }
)
CANONICAL_VIEWS = frozenset(
    {"aten.view.default", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor"}
)


def is_canonical_view(node: Node) -> bool:
    """Whether this is one of the four. A slice is, if its step is an integer, and its start one
    that counts from the beginning: from the end of a dynamic dimension, it stays PyTorch's."""
    if node.op != "aten.slice.Tensor":
        return node.op in CANONICAL_VIEWS
    if len(node.args) != 5:
        return False
    start, step = node.args[2], node.args[4]
    return isinstance(start, int) and start >= 0 and isinstance(step, int)


def is_opaque_view(node: Node) -> bool:
    """Whether this is another alias of its operand's memory."""
    return node.op in OPAQUE_VIEWS or (node.op in CANONICAL_VIEWS and not is_canonical_view(node))


def _reshape(builder: Builder, node: Node) -> Ref:
    assert node.spec is not None and isinstance(node.args[0], Ref)
    return builder.view(node, node.args[0], node.spec.shape, node.spec.strides)


def _alias(builder: Builder, node: Node) -> Ref:
    assert isinstance(node.args[0], Ref)
    return node.args[0]


def _permute_by(order: Callable[[Node, int], tuple[int, ...]]) -> Callable[[Builder, Node], Ref]:
    def lower(builder: Builder, node: Node) -> Ref:
        assert node.spec is not None
        dims = order(node, len(node.spec.shape))
        if dims == tuple(range(len(dims))):
            return _alias(builder, node)
        made = replace(node, op="aten.permute.default", args=(node.args[0], dims), kwargs=())
        return builder.add(made)

    return lower


def _given_order(node: Node, rank: int) -> tuple[int, ...]:
    dims = node.args[1]
    assert isinstance(dims, tuple)
    return tuple(_position(each, rank) for each in dims)


def _swapped(node: Node, rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    if rank > 1:
        first, second = (_position(each, rank) for each in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    return tuple(order)


def _matrix_transpose(node: Node, rank: int) -> tuple[int, ...]:
    return tuple(reversed(range(rank)))


def _position(value: Arg, rank: int) -> int:
    assert isinstance(value, int)
    return value % rank if rank else 0


def _expand(builder: Builder, node: Node) -> Ref:
    assert node.spec is not None and isinstance(node.args[0], Ref)
    if builder.spec(node.args[0].name).shape == node.spec.shape:
        return node.args[0]
    return builder.add(replace(node, args=(node.args[0], node.spec.shape), kwargs=()))


def _slice(builder: Builder, node: Node) -> Ref | None:
    """slice(x, dim, start, end, step) with integers; a symbolic start stays PyTorch's."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    held = builder.spec(node.args[0].name)
    args = [*node.args, *[None] * 5][:5]
    position = _position(args[1] if args[1] is not None else 0, len(held.shape))
    start = args[2] if args[2] is not None else 0
    step = args[4] if args[4] is not None else 1
    if held.shape == node.spec.shape and step == 1:
        return node.args[0]
    size = held.shape[position]
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    if start < 0 or not size.is_static:
        if not size.is_static and start < 0:
            return None
        start = start + size.factor if start < 0 else start
    if size.is_static:
        start = max(0, min(start, size.factor))
    length = node.spec.shape[position]
    stop: Arg = start + length.factor * step if length.is_static else args[3]
    return builder.add(replace(node, args=(node.args[0], position, start, stop, step), kwargs=()))


def _select(builder: Builder, node: Node) -> Ref | None:
    """select = a slice of length one without its dimension."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    held = builder.spec(node.args[0].name)
    position = _position(node.args[1], len(held.shape))
    index = node.args[2]
    if not isinstance(index, int):
        return None
    if index < 0:
        if not held.shape[position].is_static:
            return None
        index += held.shape[position].factor
    shape = (*held.shape[:position], ONE, *held.shape[position + 1 :])
    spec = TensorSpec(held.dtype, shape, held.strides, held.device)
    args: tuple[Arg, ...] = (node.args[0], position, index, index + 1, 1)
    piece = builder.add(Node(node.name, "aten.slice.Tensor", args, (), spec, node.source))
    return builder.view(node, piece, node.spec.shape, node.spec.strides)


def _as_strided(builder: Builder, node: Node) -> Ref | None:
    """as_strided is a view if both sides are row-major and hold the same elements."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    held = builder.spec(node.args[0].name)
    same = (
        len(node.args) == 3
        and held.numel == node.spec.numel
        and held.strides == contiguous_strides(held.shape)
        and node.spec.strides == contiguous_strides(node.spec.shape)
    )
    return _reshape(builder, node) if same else None


def piece_of_split(builder: Builder, split: Node, index: int, item: Node) -> Ref | None:
    """getitem(split(x), i) = a slice of x."""
    assert isinstance(split.args[0], Ref) and item.spec is not None
    held = builder.spec(split.args[0].name)
    given = split.args[2] if len(split.args) > 2 else dict(split.kwargs).get("dim", 0)
    position = _position(given, len(held.shape))
    sizes = split.args[1]
    if isinstance(sizes, int):
        start = index * sizes
    elif isinstance(sizes, tuple) and all(isinstance(each, int) for each in sizes):
        start = sum(each for each in sizes[:index] if isinstance(each, int))
    else:
        return None
    args: tuple[Arg, ...] = (split.args[0], position, start, None, 1)
    length = item.spec.shape[position]
    if not length.is_static:
        return None
    args = (*args[:3], start + length.factor, 1)
    made = replace(item, op="aten.slice.Tensor", args=args, kwargs=())
    return _slice(builder, made)


def _stack(builder: Builder, node: Node) -> Ref | None:
    """stack(x, y) = cat of both with one more dimension"""
    assert node.spec is not None
    given, dim = node.args[0], node.argument("dim", 1, 0)
    if not isinstance(given, tuple) or not isinstance(dim, int):
        return None
    at = dim % len(node.spec.shape)
    shape = (*node.spec.shape[:at], ONE, *node.spec.shape[at + 1 :])
    named = replace(node, name=f"{node.name}_part")
    parts = [each for each in given if isinstance(each, Ref)]
    viewed = tuple(builder.view(named, each, shape, contiguous_strides(shape)) for each in parts)
    return builder.add(replace(node, op="aten.cat.default", args=(viewed, at), kwargs=()))


SPLITS = frozenset({"aten.split.Tensor", "aten.split_with_sizes.default"})

VIEWS: dict[str, Callable[[Builder, Node], Ref | None]] = {
    "aten.as_strided.default": _as_strided,
    "aten._reshape_alias.default": _reshape,
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.unsqueeze.default": _reshape,
    "aten.squeeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.squeeze.dims": _reshape,
    "aten.permute.default": _permute_by(_given_order),
    "aten.transpose.int": _permute_by(_swapped),
    "aten.t.default": _permute_by(_matrix_transpose),
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.alias.default": _alias,
    "aten.detach.default": _alias,
    "aten.lift_fresh.default": _alias,
    "prims.view_of.default": _alias,
    "aten.stack.default": _stack,
}


def permute_order(node: Node) -> tuple[int, ...]:
    dims = node.args[1]
    assert isinstance(dims, tuple)
    return tuple(each for each in dims if isinstance(each, int))


def slice_parts(node: Node) -> tuple[int, int, int]:
    """(dimension, start, step) of a canonical slice."""
    _, position, start, _, step = node.args
    assert isinstance(position, int) and isinstance(start, int) and isinstance(step, int)
    return position, start, step
