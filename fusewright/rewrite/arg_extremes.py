"""Where a largest or smallest value lies, as one reduction.

    argmax(x) = last - low half of max(ordered(x) · 2^32 + last - index), last = 2^32 - 1

The high half of such a number is x, in whole numbers of the same order, NaN above all others: the
first of equal ones wins, as it does in PyTorch. Numbers of 64 bits do not fit, and are PyTorch's.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import ONE, ZERO, Node, Ref
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.reductions import reduce

# Devices where a value and its place are found so, too: PyTorch's host takes a third of the time
# (4096×1000 floats by rows, two Neoverse-N1; of the place alone twice the time).
PAIRS_ON = ("cuda",)
PLACES_OF = {"aten.argmax.default": False, "aten.argmin.default": True}
_PAIRS = {"aten.max.dim": False, "aten.min.dim": True}
_ORDERED = ("float16", "bfloat16", "float32")
_WHOLE = ("int32", "int16", "int8", "uint8", "bool")
_LAST = 2**32 - 1
_KEY = "int64"


def lower_place(builder: Builder, node: Node) -> Ref | None:
    """argmax or argmin."""
    return _place(builder, node, PLACES_OF[node.op]) if _fits(builder, node) else None


def has_place(builder: Builder, node: Node) -> bool:
    """Whether the second result of max or min along a dimension is found so."""
    assert isinstance(node.args[0], Ref)
    device = builder.spec(node.args[0].name).device.split(":")[0]
    return node.op in _PAIRS and device in PAIRS_ON and _fits(builder, node)


def place_alone(builder: Builder, node: Node, wanted: Node) -> Ref:
    """That result, `wanted`."""
    return _place(builder, replace(node, name=wanted.name, spec=wanted.spec), _PAIRS[node.op])


def _fits(builder: Builder, node: Node) -> bool:
    assert isinstance(node.args[0], Ref)
    held, dim = builder.spec(node.args[0].name), node.argument("dim", 1, None)
    if not isinstance(dim, int) or not held.shape or ZERO in held.shape:
        return False
    size = held.shape[dim]
    few = size != ONE and not (size.is_static and size.factor > _LAST)
    return few and held.dtype in (*_ORDERED, *_WHOLE)


def _place(builder: Builder, node: Node, smallest: bool) -> Ref:
    assert node.spec is not None and isinstance(node.args[0], Ref)
    held, dim = builder.spec(node.args[0].name), node.argument("dim", 1)
    assert isinstance(dim, int)
    dim %= len(held.shape)
    like = replace(node, name=f"{node.name}_key", spec=held)
    keys = _keys(builder, like, node.args[0], dim, smallest)
    largest = reduce(builder, like, "max", keys, (dim,))
    flat = replace(node, spec=builder.spec(largest.name))
    low = builder.point(flat, "bitwise_and", (largest, _LAST), _KEY)
    found = builder.point(flat, "sub", (_LAST, low), _KEY)
    return builder.view(node, found, node.spec.shape, node.spec.strides)


def _keys(builder: Builder, like: Node, value: Ref, dim: int, smallest: bool) -> Ref:
    """Numbers whose largest says where the value lies that is looked for."""
    assert like.spec is not None
    kind, turned = (_KEY, "bitwise_not") if like.spec.dtype in _WHOLE else ("float32", "neg")
    value = builder.cast(like, value, kind)
    value = builder.point(like, turned, (value,), kind) if smallest else value
    value = builder.point(like, "ordered", (value,), _KEY) if kind != _KEY else value
    along = builder.index_along(like, (0, 1), dim - len(like.spec.shape), _KEY)
    back = builder.point(replace(like, spec=None), "sub", (_LAST, along), _KEY)
    high = builder.point(like, "mul", (value, 2**32), _KEY)
    return builder.point(like, "add", (high, back), _KEY)
