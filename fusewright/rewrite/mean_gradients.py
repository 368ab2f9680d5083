"""The gradient of average pooling, gathered: each element sums the shares of its windows.

    dx[i] = Σ dy[y] / count[y] over the windows y that contain i

If windows tile the image, that is one window (`tiled_pooling`). If windows move by one, those of
an element surround it like taps. Otherwise element q·stride + r looks at windows q + j for a few j,
and r alone decides whether it is inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product as every

from fusewright.ir.graph import Arg, Node, Ref
from fusewright.ir.pool_offsets import MOST_TAPS, Along, Window
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.pooling import counted, joined, side_by_side, window_of
from fusewright.rewrite.surroundings import (
    at_windows,
    joined_axes,
    split_by_strides,
    steps_of,
    surrounded,
)
from fusewright.rewrite.tiled_pooling import tiled_gradient

_AXES = {"aten.avg_pool2d_backward.default": 2, "aten.avg_pool3d_backward.default": 3}
_INDEX_DTYPE = "int32"


def mean_gradient(builder: Builder, node: Node) -> Ref | None:
    """None if an element has too many windows around it, or a size is not fixed."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    axes = _AXES[node.op]
    forward = replace(node, args=node.args[1:])
    window = window_of(builder, forward, axes, forward.argument("padding", 3), None, math.inf)
    means = builder.spec(node.args[0].name)
    tiled = side_by_side(forward, axes, node.spec, means)
    if tiled is not None and (window is None or any(along.stride > 1 for along in window)):
        return tiled_gradient(builder, node, tiled, forward.argument("divisor_override", 6))
    if window is None or math.prod(len(along.around) for along in window) > MOST_TAPS:
        return None
    if not all(size.is_static for size in means.shape[-axes:]):
        return None
    divisor: Arg = forward.argument("divisor_override", 6)
    if divisor is None:
        with_padding = forward.argument("count_include_pad", 5, True)
        divisor = counted(builder, node, window, node.spec, means, with_padding is not False)
    gathers = _by_ones if all(along.stride == 1 for along in window) else _by_strides
    if not isinstance(divisor, Ref):
        total = gathers(builder, node, window)
        return total and builder.point(node, "div", (total, divisor), node.spec.dtype)
    share = builder.point(replace(node, spec=means), "div", (node.args[0], divisor), means.dtype)
    return gathers(builder, replace(node, args=(share,)), window)


def _by_ones(builder: Builder, node: Node, window: Window) -> Ref | None:
    around = tuple(Along(along.taps, 1, along.taps - 1 - along.padding) for along in window)
    return joined(builder, node, around, "add", 0)


def _by_strides(builder: Builder, node: Node, window: Window) -> Ref | None:
    assert node.spec is not None and isinstance(node.args[0], Ref)
    steps = steps_of(node, window)
    split, dtype = split_by_strides(node, window, steps), node.spec.dtype
    shares = surrounded(builder, node, node.args[0], window, steps, 0)
    total: Ref | None = None
    for windows in every(*(along.around for along in window)):
        part = at_windows(builder, node, shares, window, windows, steps)
        inside = _inside(builder, split, window, windows)
        if inside is not None:
            part = builder.point(split, "where", (inside, part, 0), dtype)
        total = part if total is None else builder.point(split, "add", (total, part), dtype)
    assert total is not None and split.spec is not None
    args: tuple[Arg, ...] = (total, split.spec.shape)  # r may have decided nothing along an axis
    whole = builder.add(replace(split, op="aten.expand.default", args=args, kwargs=()))
    return joined_axes(builder, node, whole, window, steps)


def _inside(builder: Builder, split: Node, window: Window, windows: tuple[int, ...]) -> Ref | None:
    """Whether elements q·stride + r are inside windows q + j; None if all are."""
    plain, found = replace(split, spec=None), list[Ref]()
    for at, (j, along) in enumerate(zip(windows, window, strict=True)):
        first, axis = j * along.stride - along.padding, 2 * at + 1 - 2 * len(window)
        limits = (("ge", first, 0), ("lt", first + along.taps, along.stride))
        for op, limit, all_beyond in limits:
            beyond = limit > all_beyond if op == "ge" else limit < all_beyond
            if beyond:
                r = builder.index_along(split, (0, 1), axis, _INDEX_DTYPE)
                found.append(builder.point(plain, op, (r, limit), "bool"))
    if not found:
        return None
    result = found[0]
    for each in found[1:]:
        result = builder.point(plain, "logical_and", (result, each), "bool")
    return result


MEAN_GRADIENTS: dict[str, Callable[[Builder, Node], Ref | None]] = dict.fromkeys(
    _AXES, mean_gradient
)
