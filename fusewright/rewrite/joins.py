"""aten.cat and aten.roll before a loop: a selection by index.

    cat(a, b)[.., i, ..] = a[.., i, ..] where i < size of a, else b[.., i - size of a, ..]

A loop reads each element from the tensor that has it, so no copy is needed. If nothing computes
with the result, PyTorch's copy is as good. Along the last dimension it is better, because each lane
would select for itself. A roll along a dimension joins its end and its start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusewright.ir.graph import LOOP_DTYPES, Arg, Dim, Node, Ref, contiguous_strides
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.numbers import same_number
from fusewright.rewrite.padding import padded

CAT, ROLL = "aten.cat.default", "aten.roll.default"
MOST = 8  # tensors: each is a selection for every element


def as_padding(builder: Builder, node: Node, number: Callable[[Ref], Arg]) -> Ref | None:
    """cat(c, x, c) = pad(x, …, c) if all parts but one have the same number as every element."""
    assert node.spec is not None
    given, along = node.args[0], node.argument("dim", 1, 0)
    parts = [each for each in given if isinstance(each, Ref)] if isinstance(given, tuple) else []
    if not node.spec.shape or not isinstance(along, int) or node.spec.dtype not in LOOP_DTYPES:
        return None
    at, numbers = along % len(node.spec.shape), [number(each) for each in parts]
    others = [position for position, each in enumerate(numbers) if each is None]
    held = [builder.spec(each.name) for each in parts]
    same = all(len(each.shape) == len(node.spec.shape) for each in held)
    constants = [each for each in numbers if isinstance(each, int | float)]
    if len(others) != 1 or len(constants) + 1 != len(parts) or not constants or not same:
        return None
    (only,) = others
    sizes = [each.shape[at] for each in held]
    equal = all(same_number(each, constants[0]) for each in constants)
    if not equal or not all(size.is_static for size in sizes):
        return None
    before, after = (
        sum(each.factor for each in part) for part in (sizes[:only], sizes[only + 1 :])
    )
    pairs = tuple((before, after) if d == at else (0, 0) for d in range(len(held[only].shape)))
    value = builder.cast(node, parts[only], node.spec.dtype)
    return padded(builder, node, value, pairs, constants[0])


def joined(builder: Builder, node: Node) -> Ref | None:
    """The selection, if sizes along the dimension are fixed."""
    assert node.spec is not None
    given, along = node.args[0], node.argument("dim", 1, 0)
    if not isinstance(given, tuple) or not isinstance(along, int):
        return None
    spec, rank = node.spec, len(node.spec.shape)
    at = along % rank if rank else 0
    parts = [each for each in given if isinstance(each, Ref)]
    held = [builder.spec(each.name) for each in parts]
    same = all(each.device == spec.device and len(each.shape) == rank for each in held)
    known = all(each.dtype in LOOP_DTYPES for each in (spec, *held))
    if not (same and known) or at >= rank - 1 or not 2 <= len(parts) <= MOST:
        return None
    if not all(each.shape[at].is_static for each in (spec, *held)):
        return None
    total = spec.shape[at].factor
    index = builder.index_along(node, (0, 1), at - rank)
    asked = replace(node, name=f"{node.name}_before", spec=None)
    found: Ref | None = None
    last = total
    for part, each in zip(reversed(parts), reversed(held), strict=True):
        first = last - each.shape[at].factor
        if first == last:
            continue
        pairs = tuple((first, total - last) if d == at else (0, 0) for d in range(rank))
        value = padded(builder, node, builder.cast(node, part, spec.dtype), pairs, 0)
        if value is None:
            return None
        if found is None:
            found = value
        else:
            before = builder.point(asked, "lt", (index, last), "bool")
            found = builder.point(node, "where", (before, value, found), spec.dtype)
        last = first
    if found in parts:  # all others are empty; a result needs memory of its own
        return builder.point(node, "cast", (found,), spec.dtype)
    return found


def rolled(builder: Builder, node: Node) -> Ref | None:
    """roll(x)[.., i, ..] = x[.., i - shift, ..], around the end; None if a size is not fixed."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    shifts, dims = (_as_tuple(each) for each in (node.args[1], node.argument("dims", 2, ())))
    value, rank = node.args[0], len(node.spec.shape)
    if not dims or not rank or len(shifts) != len(dims):
        return None
    for shift, dim in zip(shifts, dims, strict=True):
        at = dim % rank
        size = node.spec.shape[at]
        if not size.is_static or at == rank - 1:
            return None
        if size.factor and shift % size.factor:
            made = _rolled_along(builder, node, value, at, shift % size.factor)
            if made is None:
                return None
            value = made
    return value if value != node.args[0] else None


def _as_tuple(arg: Arg) -> tuple[int, ...]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return tuple(each for each in items if isinstance(each, int))


def _rolled_along(builder: Builder, node: Node, value: Ref, at: int, shift: int) -> Ref | None:
    held = builder.spec(value.name)
    size = held.shape[at].factor
    parts = []
    for start, stop in ((size - shift, size), (0, size - shift)):
        shape = (*held.shape[:at], Dim(stop - start), *held.shape[at + 1 :])
        args: tuple[Arg, ...] = (value, at, start, stop, 1)
        part = Node(f"{node.name}_part", "aten.slice.Tensor", args, (), replace(held, shape=shape))
        parts.append(builder.add(part))
    whole = replace(held, strides=contiguous_strides(held.shape))
    return joined(builder, replace(node, op=CAT, args=(tuple(parts), at), kwargs=(), spec=whole))
