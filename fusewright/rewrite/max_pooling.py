"""Max pooling with a gradient as loops: forward gives the place of each largest value, a byte that
backward compares with the place that each element would have.

    place(y) = the first tap of window y that is larger than all before it, or the last NaN
    dx[q·stride + r] = Σ_j dy[q + j] where place(q + j) is r + padding - j·stride, else 0

Each element gathers from the windows that it is part of, in their order: nothing is scattered, and
sums are the same each time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product as every

from fusewright.ir.graph import ONE, Arg, Dim, Node, Ref, TensorSpec, contiguous_strides
from fusewright.ir.pool_offsets import NOWHERE, Along, Window
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.padding import padded
from fusewright.rewrite.pooling import every_step, taps_of

PLACES = "fusewright.max_pool_places.default"
PLACES_BACKWARD = "fusewright.max_pool_places_backward.default"
_NUMBERS = "int32"


def largest(builder: Builder, node: Node, like: TensorSpec) -> tuple[Ref, Ref]:
    """The largest value of each window and its place; both lie in memory as `like` does."""
    assert isinstance(node.args[0], Ref)
    *described, positive = node.args[1:]
    window, pitches = _described(tuple(described))
    dtype = builder.spec(node.args[0].name).dtype
    node = replace(node, spec=replace(like, dtype=dtype))
    placer = replace(node, name=f"{node.name}_place")
    value: Ref | None = None
    place: Arg = _first_inside(builder, placer, window, pitches)
    for offsets, tap in taps_of(builder, node, window, -math.inf):
        if value is None:
            value = tap
            continue
        number = sum(pitch * each for pitch, each in zip(pitches, offsets, strict=True))
        larger = builder.point(placer, "gt", (tap, value), "bool")
        unknown = builder.point(placer, "isnan", (tap,), "bool")
        taken = builder.point(placer, "logical_or", (larger, unknown), "bool")
        place = builder.point(placer, "where", (taken, number, place), _NUMBERS)
        value = builder.point(node, "maximum", (value, tap), dtype)
    assert value is not None and node.spec is not None
    if math.prod(along.taps for along in window) == 1:  # a result has memory of its own
        value = builder.point(node, "cast", (value,), dtype)
    if positive:
        below = builder.point(placer, "le", (value, 0), "bool")
        place = builder.point(placer, "where", (below, NOWHERE, place), _NUMBERS)
    spec = replace(node.spec, dtype="uint8")
    if not isinstance(place, Ref):
        return value, builder.add(replace(placer, op="full", args=(place,), spec=spec))
    return value, builder.point(placer, "cast", (place,), "uint8")


def _first_inside(builder: Builder, node: Node, window: Window, pitches: tuple[int, ...]) -> Arg:
    """The place of each window's first tap that is no padding: of windows of -Inf alone."""
    assert node.spec is not None
    total: Arg = 0
    for axis, along in enumerate(window, -len(window)):
        if not along.padding:
            continue
        pitch = pitches[axis]
        first = builder.index_along(node, (along.padding * pitch, -along.stride * pitch), axis)
        first = builder.point(replace(node, spec=None), "maximum", (first, 0), _NUMBERS)
        total = first if total == 0 else builder.point(node, "add", (total, first), _NUMBERS)
    return total


def gathered(builder: Builder, node: Node) -> Ref:
    """Sizes that strides do not divide are filled up, and what is beyond them is cut off."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    window, pitches = _described(node.args[3:])
    sizes = [size.factor for size in node.spec.shape[-len(window) :]]
    change = builder.spec(node.args[0].name)
    steps = [-(-size // along.stride) for size, along in zip(sizes, window, strict=True)]
    split = [
        Dim(each) for q, along in zip(steps, window, strict=True) for each in (q, along.stride)
    ]
    shape = (*change.shape[: -len(window)], *split)
    apart = replace(node, spec=replace(node.spec, shape=shape, strides=contiguous_strides(shape)))
    own = _own_place(builder, apart, window, pitches)
    changes, places = _around(builder, node, window, steps)
    total: Ref | None = None
    for windows in every(*(along.around for along in window)):
        each, there = (_at(builder, node, of, window, windows, steps) for of in (changes, places))
        there = builder.cast(node, there, _NUMBERS)
        shift = sum(j * s.stride * p for j, s, p in zip(windows, window, pitches, strict=True))
        here = own - shift if isinstance(own, int) else own
        if isinstance(here, Ref) and shift:
            here = builder.point(replace(node, spec=None), "sub", (here, shift), _NUMBERS)
        same = builder.point(apart, "eq", (there, here), "bool")
        part = builder.point(apart, "where", (same, each, 0), node.spec.dtype)
        total = part if total is None else builder.point(apart, "add", (total, part), change.dtype)
    assert total is not None
    return _joined_axes(builder, node, total, window, steps)


def _own_place(builder: Builder, node: Node, window: Window, pitches: tuple[int, ...]) -> int | Ref:
    """The place of an element in window q, from its index r of each axis."""
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
        result = builder.point(plain, "add", (result, each), _NUMBERS)
    return builder.point(plain, "add", (result, same), _NUMBERS) if same else result


def _around(builder: Builder, node: Node, window: Window, steps: list[int]) -> tuple[Ref, Ref]:
    """Gradients and places, with windows that there are not wherever one will be asked for."""
    change, places = node.args[:2]
    assert isinstance(change, Ref) and isinstance(places, Ref)
    shape = builder.spec(change.name).shape
    pairs = [(0, 0)] * (len(shape) - len(window))
    for many, along, q in zip(shape[-len(window) :], window, steps, strict=True):
        after = q + along.around[-1] - many.factor
        pairs.append((max(0, -along.around[0]), max(0, after)))
    named = replace(node, name=f"{node.name}_around", spec=None)
    found = [
        padded(builder, named, each, tuple(pairs), outside)
        for each, outside in ((change, 0), (places, NOWHERE))
    ]
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


def _at(
    builder: Builder,
    node: Node,
    value: Ref,
    window: Window,
    windows: tuple[int, ...],
    steps: list[int],
) -> Ref:
    """Window q + j for each q, with an axis of size one for r."""
    held = builder.spec(value.name)
    lead = held.shape[: -len(window)]
    like = replace(node, spec=replace(held, shape=(*lead, *map(Dim, steps))))
    for axis, (j, along) in enumerate(zip(windows, window, strict=True), len(lead)):
        value = every_step(builder, like, value, axis, j + max(0, -along.around[0]), 1)
    shape = (*lead, *(size for q in steps for size in (Dim(q), ONE)))
    return builder.view(node, value, shape, contiguous_strides(shape))


def _joined_axes(builder: Builder, node: Node, value: Ref, window: Window, steps: list[int]) -> Ref:
    assert node.spec is not None
    lead = node.spec.shape[: -len(window)]
    full = [Dim(q * along.stride) for q, along in zip(steps, window, strict=True)]
    value = builder.view(node, value, (*lead, *full), contiguous_strides((*lead, *full)))
    for axis in range(len(lead), len(node.spec.shape)):
        value = every_step(builder, node, value, axis, 0, 1)
    return builder.point(node, "cast", (value,), node.spec.dtype)


def _described(args: tuple[Arg, ...]) -> tuple[Window, tuple[int, ...]]:
    """Kernel size, stride, padding, dilation, ceil mode and pitches, as capture wrote them."""
    *columns, _, pitches = (_whole(each) for each in args)
    return tuple(Along(*each) for each in zip(*columns, strict=True)), pitches


def _whole(arg: Arg) -> tuple[int, ...]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return tuple(each for each in items if isinstance(each, int))
