"""argmax and argmin as one reduction.

    argmax(x) = last - low 32 bits of max(ordered(x) · 2^32 + last - index), last = 2^32 - 1

The high 32 bits of such a key are x as an integer of the same order, with NaN above all others. Of
equal values the first wins, as in PyTorch. 64-bit values do not fit; PyTorch handles them.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import ONE, ZERO, Node, Ref
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.reductions import reduce

# Devices where max and min with an index use this, too. On the host, PyTorch takes a third of the
# time for both results (4096×1000 floats by rows, two Neoverse-N1), but twice the time for the
# index alone.
PAIRS_ON = ("cuda",)
ARG_EXTREMES = {"aten.argmax.default": False, "aten.argmin.default": True}
_PAIRS = {"aten.max.dim": False, "aten.min.dim": True}
_ORDERED = ("float16", "bfloat16", "float32")
_WHOLE = ("int32", "int16", "int8", "uint8", "bool")
_LAST = 2**32 - 1
_KEY = "int64"


def lower_arg_extreme(builder: Builder, node: Node) -> Ref | None:
    """argmax or argmin."""
    return _arg_extreme(builder, node, ARG_EXTREMES[node.op]) if _fits(builder, node) else None


def has_arg_extreme(builder: Builder, node: Node) -> bool:
    """Whether the index result of max or min along a dimension is computed this way."""
    assert isinstance(node.args[0], Ref)
    device = builder.spec(node.args[0].name).device.split(":")[0]
    return node.op in _PAIRS and device in PAIRS_ON and _fits(builder, node)


def arg_extreme_alone(builder: Builder, node: Node, wanted: Node) -> Ref:
    """The index result, `wanted`."""
    return _arg_extreme(builder, replace(node, name=wanted.name, spec=wanted.spec), _PAIRS[node.op])


def _fits(builder: Builder, node: Node) -> bool:
    assert isinstance(node.args[0], Ref)
    held, dim = builder.spec(node.args[0].name), node.argument("dim", 1, None)
    if not isinstance(dim, int) or not held.shape or ZERO in held.shape:
        return False
    size = held.shape[dim]
    few = size != ONE and not (size.is_static and size.factor > _LAST)
    return few and held.dtype in (*_ORDERED, *_WHOLE)


def _arg_extreme(builder: Builder, node: Node, smallest: bool) -> Ref:
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
    """Keys whose maximum contains the index."""
    assert like.spec is not None
    kind, negated = (_KEY, "bitwise_not") if like.spec.dtype in _WHOLE else ("float32", "neg")
    value = builder.cast(like, value, kind)
    value = builder.point(like, negated, (value,), kind) if smallest else value
    value = builder.point(like, "ordered", (value,), _KEY) if kind != _KEY else value
    along = builder.index_along(like, (0, 1), dim - len(like.spec.shape), _KEY)
    back = builder.point(replace(like, spec=None), "sub", (_LAST, along), _KEY)
    high = builder.point(like, "mul", (value, 2**32), _KEY)
    return builder.point(like, "add", (high, back), _KEY)
