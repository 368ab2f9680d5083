"""Max pooling with a gradient, as loops: forward gives each maximum's offset in its window, a byte,
and backward compares it with the offset that each element would have.

    offset(y) = the first tap of window y that is larger than all before it, or the last NaN
    dx[q·stride + r] = Σ_j dy[q + j] where offset(q + j) is r + padding - j·stride, else 0

Each element gathers from the windows that it belongs to, in order. Nothing is scattered, and sums
are the same each time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product as every

from fusewright.ir.graph import Arg, Node, Ref, TensorSpec
from fusewright.ir.pool_offsets import NOWHERE, Along, Window
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.pooling import taps_of
from fusewright.rewrite.surroundings import (
    at_windows,
    joined_axes,
    split_by_strides,
    steps_of,
    surrounded,
)

POOL_OFFSETS = "fusewright.max_pool_offsets.default"
POOL_OFFSETS_BACKWARD = "fusewright.max_pool_offsets_backward.default"
_INDEX_DTYPE = "int32"


def largest(builder: Builder, node: Node, like: TensorSpec) -> tuple[Ref, Ref]:
    """The maximum of each window and its offset; both have the layout of `like`."""
    assert isinstance(node.args[0], Ref)
    *described, positive = node.args[1:]
    window, pitches = _described(tuple(described))
    dtype = builder.spec(node.args[0].name).dtype
    node = replace(node, spec=replace(like, dtype=dtype))
    named = replace(node, name=f"{node.name}_place")
    value: Ref | None = None
    offset: Arg = _first_inside(builder, named, window, pitches)
    for offsets, tap in taps_of(builder, node, window, -math.inf):
        if value is None:
            value = tap
            continue
        number = sum(pitch * each for pitch, each in zip(pitches, offsets, strict=True))
        larger = builder.point(named, "gt", (tap, value), "bool")
        unknown = builder.point(named, "isnan", (tap,), "bool")
        taken = builder.point(named, "logical_or", (larger, unknown), "bool")
        offset = builder.point(named, "where", (taken, number, offset), _INDEX_DTYPE)
        value = builder.point(node, "maximum", (value, tap), dtype)
    assert value is not None and node.spec is not None
    if math.prod(along.taps for along in window) == 1:  # a result needs memory of its own
        value = builder.point(node, "cast", (value,), dtype)
    if positive:
        below = builder.point(named, "le", (value, 0), "bool")
        offset = builder.point(named, "where", (below, NOWHERE, offset), _INDEX_DTYPE)
    spec = replace(node.spec, dtype="uint8")
    if not isinstance(offset, Ref):
        return value, builder.add(replace(named, op="full", args=(offset,), spec=spec))
    return value, builder.point(named, "cast", (offset,), "uint8")


def _first_inside(builder: Builder, node: Node, window: Window, pitches: tuple[int, ...]) -> Arg:
    """The offset of each window's first tap that is not padding, for windows of only -Inf."""
    total: Arg = 0
    for axis, (along, pitch) in enumerate(zip(window, pitches, strict=True), -len(window)):
        if not along.padding:
            continue
        first = _first_along(builder, node, along, pitch, axis)
        total = first if total == 0 else builder.point(node, "add", (total, first), _INDEX_DTYPE)
    return total


def _first_along(builder: Builder, node: Node, along: Along, pitch: int, axis: int) -> Ref:
    """pitch · max(0, padding - y·stride), rounded up to a multiple of the dilation."""
    plain = replace(node, spec=None)
    if along.dilation == 1:
        beyond = builder.index_along(node, (along.padding * pitch, -along.stride * pitch), axis)
        return builder.point(plain, "maximum", (beyond, 0), _INDEX_DTYPE)
    beyond = builder.index_along(node, (along.padding, -along.stride), axis)
    total: Ref | None = None
    for taps in range(0, along.padding, along.dilation):  # one more tap is padding
        more = builder.point(plain, "gt", (beyond, taps), "bool")
        step = builder.point(plain, "where", (more, along.dilation * pitch, 0), _INDEX_DTYPE)
        both = (total, step)
        total = step if total is None else builder.point(plain, "add", both, _INDEX_DTYPE)
    assert total is not None
    return total


def gathered(builder: Builder, node: Node) -> Ref:
    """The gradient. Sizes that are no multiple of the stride are padded, and cut off at the end."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    window, pitches = _described(node.args[3:])
    assert isinstance(node.args[1], Ref)
    grad_output, steps = builder.spec(node.args[0].name), steps_of(node, window)
    split_node = split_by_strides(node, window, steps)
    own = _own_offset(builder, split_node, window, pitches)
    surroundings = [
        surrounded(builder, node, each, window, steps, outside)
        for each, outside in ((node.args[0], 0), (node.args[1], NOWHERE))
    ]
    total: Ref | None = None
    for windows in every(*(along.around for along in window)):
        each, there = (at_windows(builder, node, of, window, windows, steps) for of in surroundings)
        there = builder.cast(node, there, _INDEX_DTYPE)
        shift = sum(j * s.stride * p for j, s, p in zip(windows, window, pitches, strict=True))
        here = own - shift if isinstance(own, int) else own
        if isinstance(here, Ref) and shift:
            here = builder.point(replace(node, spec=None), "sub", (here, shift), _INDEX_DTYPE)
        same = builder.point(split_node, "eq", (there, here), "bool")
        part = builder.point(split_node, "where", (same, each, 0), node.spec.dtype)
        both, dtype = (total, part), grad_output.dtype
        total = part if total is None else builder.point(split_node, "add", both, dtype)
    assert total is not None
    return joined_axes(builder, node, total, window, steps)


def _own_offset(
    builder: Builder, node: Node, window: Window, pitches: tuple[int, ...]
) -> int | Ref:
    """The offset of an element in window q, from its index r of each axis."""
    same, total = 0, list[Ref]()
    for at, (along, pitch) in enumerate(zip(window, pitches, strict=True)):
        axis = 2 * at + 1 - 2 * len(window)
        if along.stride == 1:
            same += along.padding * pitch
        else:
            total.append(builder.index_along(node, (along.padding * pitch, pitch), axis))
    if not total:
        return same
    plain, result = replace(node, spec=None), total[0]
    for each in total[1:]:
        result = builder.point(plain, "add", (result, each), _INDEX_DTYPE)
    return builder.point(plain, "add", (result, same), _INDEX_DTYPE) if same else result


def _described(args: tuple[Arg, ...]) -> tuple[Window, tuple[int, ...]]:
    """Kernel size, stride, padding, dilation, ceil mode and pitches, as capture wrote them."""
    *columns, _, pitches = (_whole(each) for each in args)
    return tuple(Along(*each) for each in zip(*columns, strict=True)), pitches


def _whole(arg: Arg) -> tuple[int, ...]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return tuple(each for each in items if isinstance(each, int))
