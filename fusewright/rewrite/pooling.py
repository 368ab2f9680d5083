"""Pooling, upsampling by integer factors, and max and min along a dimension.

    max_pool(x)[.., y, x] = max of x[.., y·stride + j·dilation - padding, ..] over the taps (j, i)
    avg_pool(x)           = their sum / their count
    upsample_nearest(x)[.., y, x] = x[.., y / times, x / times]; its gradient is a window's sum

Each tap is a slice of the image, padded if windows reach beyond it, and pointwise operators join
the taps. So pooling fuses with the loops before and after it. (If windows overlap and their operand
is costly, the plan stores it first.) Max pooling with a gradient is in `max_pooling`, and argmax in
`arg_extremes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product as every

from fusewright.ir.graph import FLOATS, ONE, ZERO, Arg, Node, Ref, TensorSpec, contiguous_strides
from fusewright.ir.pool_offsets import MOST_TAPS, Along, Window
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.padding import padded
from fusewright.rewrite.reductions import REDUCTIONS
from fusewright.rewrite.tiled_pooling import (
    Tile,
    has_long_rows,
    tiled_mean,
    tiles_of,
)

MOST_TIMES = 16
_COUNTS = "int32"
LARGEST_BY_DIM = {"aten.max.dim": "aten.amax.default", "aten.min.dim": "aten.amin.default"}
# Operators whose first result can be computed without the second, with their number of axes.
LARGEST_OF_WINDOWS = {
    "aten.max_pool2d_with_indices.default": 2,
    "aten.max_pool3d_with_indices.default": 3,
}
VALUES = frozenset({*LARGEST_BY_DIM, *LARGEST_OF_WINDOWS})
_MEANS = {"aten.avg_pool1d.default": 1, "aten.avg_pool2d.default": 2, "aten.avg_pool3d.default": 3}
_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")
_ENLARGED = {f"aten.{each}{axes}d.default": axes for each in _NEAREST for axes in (1, 2, 3)}
_ENLARGED_GRADIENTS = {
    f"aten.{each}{axes}d_backward.default": axes for each in _NEAREST for axes in (1, 2, 3)
}


def values_alone(builder: Builder, node: Node, wanted: Node) -> Ref | None:
    """The first of two results, `wanted`."""
    assert wanted.spec is not None
    if node.op in LARGEST_BY_DIM:
        assert isinstance(node.args[0], Ref)
        if ZERO in builder.spec(node.args[0].name).shape:
            return None  # PyTorch refuses the maximum of an empty tensor
        args = (node.args[0], (node.argument("dim", 1),), node.argument("keepdim", 2, False))
        op = LARGEST_BY_DIM[node.op]
        return REDUCTIONS[op](builder, Node(wanted.name, op, args, (), wanted.spec, node.source))
    axes = LARGEST_OF_WINDOWS[node.op]
    padding, dilation = node.argument("padding", 3), node.argument("dilation", 4)
    window = window_of(builder, node, axes, padding, dilation)
    named = replace(node, name=wanted.name, spec=wanted.spec)
    return None if window is None else joined(builder, named, window, "maximum", -math.inf)


def _mean(builder: Builder, node: Node) -> Ref | None:
    assert node.spec is not None and isinstance(node.args[0], Ref)
    window = window_of(builder, node, _MEANS[node.op], node.argument("padding", 3), None)
    if window is None:
        image = builder.spec(node.args[0].name)
        tiles = side_by_side(node, _MEANS[node.op], image, node.spec)
        if tiles is None or not has_long_rows(tiles):
            return None
        return tiled_mean(builder, node, tiles, node.argument("divisor_override", 6))
    total = joined(builder, node, window, "add", 0)
    if total is None:
        return None
    divisor: Arg = node.argument("divisor_override", 6)
    if divisor is None:
        with_padding = node.argument("count_include_pad", 5, True)
        image = builder.spec(node.args[0].name)
        divisor = counted(builder, node, window, image, node.spec, with_padding is not False)
    return builder.point(node, "div", (total, divisor), node.spec.dtype) if divisor != 1 else total


def counted(
    builder: Builder,
    node: Node,
    window: Window,
    image: TensorSpec,
    means: TensorSpec,
    with_padding: bool,
) -> Arg:
    """How many taps each mean divides by, over all axes."""
    same, varying = 1, list[Arg]()
    for at, along in enumerate(window, -len(window)):
        size = image.shape[at].factor
        count = _counted_along(builder, node, along, size, at, means, with_padding)
        if isinstance(count, int):
            same *= count
        else:
            varying.append(count)
    if not varying:
        return same
    counter = replace(node, name=f"{node.name}_count", spec=None)
    total = varying[0]
    for each in (*varying[1:], *[same] * (same > 1)):
        total = builder.point(counter, "mul", (total, each), _COUNTS)
    wide = "float64" if means.dtype == "float64" else "float32"
    return builder.point(counter, "cast", (total,), wide)


def _counted_along(
    builder: Builder,
    node: Node,
    along: Along,
    size: int,
    axis: int,
    means: TensorSpec,
    with_padding: bool,
) -> int | Ref:
    """Fewer taps count where a window reaches beyond the image, or beyond the padding if that
    counts. If the count varies, it is computed from the window's index."""
    many = means.shape[axis]
    least = -along.padding if with_padding else 0
    end = size + (along.padding if with_padding else 0)
    starts = [each * along.stride - along.padding for each in range(many.factor)]
    counts = {min(start + along.taps, end) - max(start, least) for start in starts}
    if len(counts) <= 1 and min(counts, default=1) > 0:
        return max(counts, default=1)
    spec = TensorSpec(_COUNTS, (many,), (ONE,), means.device)
    index = Node(f"{node.name}_index", "iota", (), (), spec, node.source)
    first = builder.add(replace(index, args=(-along.padding, along.stride)))
    past = builder.add(replace(index, args=(along.taps - along.padding, along.stride)))
    first = builder.point(index, "maximum", (first, least), _COUNTS)
    past = builder.point(index, "minimum", (past, end), _COUNTS)
    count = builder.point(index, "sub", (past, first), _COUNTS)
    if min(counts) < 1:  # the whole window is padding, and its sum is zero
        count = builder.point(index, "maximum", (count, 1), _COUNTS)
    shape = (many, *(ONE for _ in range(-1 - axis)))
    return builder.view(index, count, shape, contiguous_strides(shape))


def side_by_side(
    node: Node, axes: int, image: TensorSpec, means: TensorSpec
) -> tuple[Tile, ...] | None:
    """The windows, if they lie side by side and inside the image."""
    taps = _numbers(node.argument("kernel_size", 1), axes, 1)
    stride = node.argument("stride", 2)
    steps = _numbers(stride, axes, 1) if stride not in (None, ()) else taps
    if any(_numbers(node.argument("padding", 3), axes, 0)):
        return None
    return tiles_of(image, means, taps, steps)


def _spread(builder: Builder, node: Node, value: Ref, times: tuple[int, ...]) -> Ref:
    """Repeat each element so many times, along the last axes."""
    assert node.spec is not None
    held, axes = builder.spec(value.name), len(times)
    outer, strides = held.shape[:-axes], held.strides[:-axes]
    inner = list(zip(held.shape[-axes:], held.strides[-axes:], times, strict=True))
    single = (*outer, *(size for many, _, _ in inner for size in (many, ONE)))
    doubled = (*strides, *(each for _, stride, _ in inner for each in (stride, stride)))
    wide = (*outer, *(size for many, _, k in inner for size in (many, ONE * k)))
    viewed = builder.view(node, value, single, doubled)
    spec = TensorSpec(held.dtype, wide, contiguous_strides(wide), held.device)
    args: tuple[Arg, ...] = (viewed, wide)
    made = builder.add(Node(node.name, "aten.expand.default", args, (), spec, node.source))
    return builder.view(node, made, node.spec.shape, contiguous_strides(node.spec.shape))


def _enlarged(builder: Builder, node: Node) -> Ref | None:
    assert node.spec is not None and isinstance(node.args[0], Ref)
    axes = _ENLARGED[node.op]
    held = builder.spec(node.args[0].name)
    times = _times(held, node.spec, node.args[2:], axes)
    if times is None:
        return None
    whole = _spread(builder, node, node.args[0], times)
    return builder.point(node, "cast", (whole,), node.spec.dtype)


def _enlarged_gradient(builder: Builder, node: Node) -> Ref | None:
    assert node.spec is not None and isinstance(node.args[0], Ref)
    axes = _ENLARGED_GRADIENTS[node.op]
    grad_output = builder.spec(node.args[0].name)
    times = _times(node.spec, grad_output, node.args[3:], axes)
    window = tuple(Along(k, k) for k in times or ())
    return joined(builder, node, window, "add", 0) if window else None


def _times(
    small: TensorSpec, large: TensorSpec, scales: tuple[Arg, ...], axes: int
) -> tuple[int, ...] | None:
    """The factors by which an image grows; None if they are not integers.

    PyTorch uses a float32 scale to find the nearest element; up to MOST_TIMES that is the quotient.
    """
    sizes = list(zip(small.shape[-axes:], large.shape[-axes:], strict=True))
    if not all(each.is_static and each.factor > 0 for pair in sizes for each in pair):
        return None
    times = tuple(after.factor // before.factor for before, after in sizes)
    whole = all(k * a.factor == b.factor for k, (a, b) in zip(times, sizes, strict=True))
    given = [scale for scale in scales if scale is not None]
    asked = not given or tuple(given) == times
    fits = whole and asked and max(times) <= MOST_TIMES and math.prod(times) <= MOST_TAPS
    return times if fits else None


POOLS: dict[str, Callable[[Builder, Node], Ref | None]] = {
    **dict.fromkeys(_MEANS, _mean),
    **dict.fromkeys(_ENLARGED, _enlarged),
    **dict.fromkeys(_ENLARGED_GRADIENTS, _enlarged_gradient),
}


def window_of(
    builder: Builder,
    node: Node,
    axes: int,
    padding: Arg,
    dilation: Arg,
    most: float = MOST_TAPS,
) -> Window | None:
    """None if a window has more taps, or a size is not fixed."""
    assert isinstance(node.args[0], Ref)
    taps = _numbers(node.argument("kernel_size", 1), axes, 1)
    stride = node.argument("stride", 2)
    steps = _numbers(stride, axes, 1) if stride not in (None, ()) else taps
    pads, spread = _numbers(padding, axes, 0), _numbers(dilation, axes, 1)
    window = tuple(Along(*each) for each in zip(taps, steps, pads, spread, strict=True))
    sizes = builder.spec(node.args[0].name).shape[-axes:]
    few = 0 < _count(window) <= most and all(size.is_static for size in sizes)
    return window if few else None


def _numbers(value: Arg, axes: int, otherwise: int) -> tuple[int, ...]:
    """One value per axis; PyTorch also accepts a single value for all axes."""
    items = value if isinstance(value, tuple) else (value,)
    given = [item for item in items if isinstance(item, int)] or [otherwise]
    return tuple(given * axes)[:axes] if len(given) == 1 else tuple(given)


def _count(window: Window) -> int:
    return math.prod(along.taps for along in window)


def joined(builder: Builder, node: Node, window: Window, op: str, outside: float) -> Ref | None:
    """All taps of each window, joined by a pointwise operator in order."""
    assert isinstance(node.args[0], Ref)
    dtype = builder.spec(node.args[0].name).dtype
    result: Ref | None = None
    for _, value in taps_of(builder, node, window, outside):
        result = value if result is None else builder.point(node, op, (result, value), dtype)
    if result is not None and _count(window) == 1:  # a result needs memory of its own
        result = builder.point(node, "cast", (result,), dtype)
    return result


def taps_of(
    builder: Builder, node: Node, window: Window, outside: float
) -> Iterator[tuple[tuple[int, ...], Ref]]:
    """Each tap of all windows, with its offsets; nothing if a size cannot be padded."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    held, axes = builder.spec(node.args[0].name), len(window)
    rank = len(held.shape)
    pairs = [(0, 0)] * (rank - axes)
    made = node.spec.shape[-axes:]
    for size, many, along in zip(held.shape[-axes:], made, window, strict=True):
        reach = (many.factor - 1) * along.stride + along.last + 1
        pairs.append((along.padding, max(0, reach - along.padding - size.factor)))
    if held.dtype not in FLOATS and any(pair != (0, 0) for pair in pairs):
        return  # integers have no -Inf
    named = replace(node, name=f"{node.name}_padded", spec=None)
    whole = padded(builder, named, node.args[0], tuple(pairs), outside)
    if whole is None:
        return
    for offsets in every(*(range(0, along.last + 1, along.dilation) for along in window)):
        value = whole
        for at, (start, along) in enumerate(zip(offsets, window, strict=True), rank - axes):
            value = every_step(builder, node, value, at, start, along.stride)
        yield offsets, value


def every_step(builder: Builder, node: Node, value: Ref, axis: int, start: int, step: int) -> Ref:
    """Every step-th element along an axis, as many as the result has."""
    assert node.spec is not None
    held, many = builder.spec(value.name), node.spec.shape[axis]
    if (start, step) == (0, 1) and held.shape[axis] == many:
        return value
    shape = (*held.shape[:axis], many, *held.shape[axis + 1 :])
    strides = (*held.strides[:axis], held.strides[axis] * step, *held.strides[axis + 1 :])
    spec = TensorSpec(held.dtype, shape, strides, held.device)
    stop = start + many.factor * step
    args: tuple[Arg, ...] = (value, axis, start, stop, step)
    return builder.add(Node(node.name, "aten.slice.Tensor", args, (), spec, node.source))
