"""Pooling whose windows do not overlap, images made larger by whole numbers, and largest and
smallest values without their places.

    max_pool(x)[.., y, x] = max of x[.., y·stride + j, x·stride + i] over the window's taps (j, i)
    avg_pool(x)           = their sum / how many there are
    upsample_nearest(x)[.., y, x] = x[.., y / times, x / times]; its gradient is a window's sum

Each tap is a slice, and what joins them is pointwise: so pooling goes into one loop with what comes
before it and after. Windows that overlap would compute what comes before several times, and windows
that reach beyond the image have taps that are no slices: those stay PyTorch's. So does all that is
asked for where a largest value lies, which gradients need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product as every

from fusewright.ir import ONE, ZERO, Arg, Node, Ref, TensorSpec, contiguous_strides
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.reductions import REDUCTIONS

MOST_TAPS = 32
MOST_TIMES = 16
LARGEST_BY_DIM = {"aten.max.dim": "aten.amax.default", "aten.min.dim": "aten.amin.default"}
# Operators whose first result can be computed without the second, with their axes.
LARGEST_OF_WINDOWS = {
    "aten.max_pool2d_with_indices.default": 2,
    "aten.max_pool3d_with_indices.default": 3,
}
VALUES = frozenset({*LARGEST_BY_DIM, *LARGEST_OF_WINDOWS})
_MEANS = {"aten.avg_pool1d.default": 1, "aten.avg_pool2d.default": 2, "aten.avg_pool3d.default": 3}
_GRADIENTS = {"aten.avg_pool2d_backward.default": 2, "aten.avg_pool3d_backward.default": 3}
_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")
_ENLARGED = {f"aten.{each}{axes}d.default": axes for each in _NEAREST for axes in (1, 2, 3)}
_ENLARGED_GRADIENTS = {
    f"aten.{each}{axes}d_backward.default": axes for each in _NEAREST for axes in (1, 2, 3)
}


def values_alone(builder: Builder, node: Node, wanted: Node) -> Ref | None:
    """The first of two results, `wanted`, where nobody reads the second."""
    assert wanted.spec is not None
    if node.op in LARGEST_BY_DIM:
        assert isinstance(node.args[0], Ref)
        if ZERO in builder.spec(node.args[0].name).shape:
            return None  # there is none of nothing, which PyTorch says
        args = (node.args[0], (node.argument("dim", 1),), node.argument("keepdim", 2, False))
        op = LARGEST_BY_DIM[node.op]
        return REDUCTIONS[op](builder, Node(wanted.name, op, args, (), wanted.spec, node.source))
    numbers = (*node.args[1:], *(None,) * 5)[:5]
    window = _window(builder, node, LARGEST_OF_WINDOWS[node.op], numbers[0], numbers[1], numbers[2])
    spread = _numbers(numbers[3], LARGEST_OF_WINDOWS[node.op], 1)
    if window is None or set(spread) != {1}:
        return None
    return _joined(builder, replace(node, name=wanted.name, spec=wanted.spec), window, "maximum")


def _mean(builder: Builder, node: Node) -> Ref | None:
    assert node.spec is not None
    kernel, stride, padding, _, _, divisor = (*node.args[1:], *(None,) * 6)[:6]
    window = _window(builder, node, _MEANS[node.op], kernel, stride, padding)
    if window is None or divisor is not None:
        return None
    total = _joined(builder, node, window, "add")
    if total is None:
        return None
    count = _count(window)
    return builder.point(node, "div", (total, count), node.spec.dtype) if count > 1 else total


def _mean_gradient(builder: Builder, node: Node) -> Ref | None:
    """Each tap has its share, where windows cover the image."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    kernel, stride, padding, _, _, divisor = (*node.args[2:], *(None,) * 6)[:6]
    axes = _GRADIENTS[node.op]
    window = _window(builder, replace(node, args=node.args[1:]), axes, kernel, stride, padding)
    sizes = node.spec.shape[-axes:]
    if window is None or divisor is not None:
        return None
    change = builder.spec(node.args[0].name)
    pairs = list(zip(change.shape[-axes:], (k for k, _ in window), strict=True))
    if any(k != s for k, s in window) or any(
        many * k != size for (many, k), size in zip(pairs, sizes, strict=True)
    ):
        return None
    share = builder.point(
        replace(node, spec=None), "div", (node.args[0], _count(window)), change.dtype
    )
    whole = _spread(builder, node, share, tuple(k for k, _ in window))
    return builder.point(node, "cast", (whole,), node.spec.dtype)


def _spread(builder: Builder, node: Node, value: Ref, times: tuple[int, ...]) -> Ref:
    """Each number so many times beside itself, along the last axes."""
    assert node.spec is not None
    held, axes = builder.spec(value.name), len(times)
    outer, strides = held.shape[:-axes], held.strides[:-axes]
    inner = list(zip(held.shape[-axes:], held.strides[-axes:], times, strict=True))
    single = (*outer, *(size for many, _, _ in inner for size in (many, ONE)))
    apart = (*strides, *(each for _, stride, _ in inner for each in (stride, stride)))
    wide = (*outer, *(size for many, _, k in inner for size in (many, ONE * k)))
    viewed = builder.view(node, value, single, apart)
    spec = TensorSpec(held.dtype, wide, contiguous_strides(wide), held.device)
    args: tuple[Arg, ...] = (viewed, wide)
    made = builder.add(Node(node.name, "aten.expand.default", args, (), spec, node.source))
    return builder.view(node, made, node.spec.shape, node.spec.strides)


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
    change = builder.spec(node.args[0].name)
    times = _times(node.spec, change, node.args[3:], axes)
    return None if times is None else _joined(builder, node, [(k, k) for k in times], "add")


def _times(
    small: TensorSpec, large: TensorSpec, scales: tuple[Arg, ...], axes: int
) -> tuple[int, ...] | None:
    """How many times as large an image becomes; None where that is no whole number.

    PyTorch asks a scale of float32 which number is nearest: up to MOST_TIMES that is the quotient.
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
    **dict.fromkeys(_GRADIENTS, _mean_gradient),
    **dict.fromkeys(_ENLARGED, _enlarged),
    **dict.fromkeys(_ENLARGED_GRADIENTS, _enlarged_gradient),
}

# A window along each axis: its taps, and the stride.
Window = list[tuple[int, int]]


def _window(
    builder: Builder, node: Node, axes: int, kernel: Arg, stride: Arg, padding: Arg
) -> Window | None:
    """None where windows overlap, reach beyond the image, or have many taps."""
    assert isinstance(node.args[0], Ref)
    taps = _numbers(kernel, axes, 1)
    steps = _numbers(stride, axes, 1) if stride not in (None, ()) else taps
    sizes = builder.spec(node.args[0].name).shape[-axes:]
    window = list(zip(taps, steps, strict=True))
    if set(_numbers(padding, axes, 0)) != {0} or not all(size.is_static for size in sizes):
        return None
    apart = all(k <= s for k, s in window) and 0 < _count(window) <= MOST_TAPS
    return window if apart else None


def _numbers(value: Arg, axes: int, otherwise: int) -> tuple[int, ...]:
    """One for each axis; PyTorch takes a single one for all of them, too."""
    items = value if isinstance(value, tuple) else (value,)
    given = [item for item in items if isinstance(item, int)] or [otherwise]
    return tuple(given * axes)[:axes] if len(given) == 1 else tuple(given)


def _count(window: Window) -> int:
    return math.prod(taps for taps, _ in window)


def _joined(builder: Builder, node: Node, window: Window, op: str) -> Ref | None:
    """All taps of each window joined by a pointwise operator, in their order."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    held, axes = builder.spec(node.args[0].name), len(window)
    made = node.spec.shape[-axes:]
    for size, many, (taps, step) in zip(held.shape[-axes:], made, window, strict=True):
        if (size.factor - taps) // step + 1 != many.factor:
            return None  # rounded up, so that a window reaches beyond the image
    result: Ref | None = None
    for places in every(*(range(taps) for taps, _ in window)):
        value = node.args[0]
        for at, (place, (_, step)) in enumerate(zip(places, window, strict=True)):
            value = _every(builder, node, value, len(held.shape) - axes + at, place, step)
        value = value if result is None else builder.point(node, op, (result, value), held.dtype)
        result = value
    assert result is not None
    if _count(window) == 1:  # a result has memory of its own
        result = builder.point(node, "cast", (result,), held.dtype)
    return result


def _every(builder: Builder, node: Node, value: Ref, axis: int, start: int, step: int) -> Ref:
    """Every step-th along an axis, as many as the result has."""
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
