"""Which reductions of a window's result its kernel can end in.

A result has images, channels and positions y and x. What its tiles can reduce, beside what they do
point by point, is

    over positions    of each channel, for all images or for each apart; neighbouring channels may
                      go together, all of them too: batch, instance, group, layer norm, pooling
    over channels     of each position

`window_sweep` is the one place that says so. It gives the loop's axes names of their own: `image`,
`channel`, `member` (of channels that go together), `y` and `x`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fusewright.ir.graph import ONE, ZERO, Dim, product
from fusewright.ir.loop import Axis, Load, LoopKernel
from fusewright.schedule.coalesce import Strides, merge, restrided, split_axis

VOLUME = 5  # axes of a result with three for its positions
# An axis of the loop as it should be: its name, and where it is now; None for one of size one.
Place = tuple[str, int | None]


class Result(NamedTuple):
    """The sizes of a window's result; an image of one dimension is a single row, one of three has
    the rows of all its planes."""

    images: Dim
    channels: Dim
    y: Dim
    x: Dim


def window_sweep(kernel: LoopKernel, name: str, shape: Sequence[Dim]) -> LoopKernel | None:
    """A loop that reduces what window `name` gives, over the axes that its kernel has; None where
    that cannot be."""
    of = Result(shape[0], shape[1], product(shape[2:-1]), shape[-1])
    whole = product(axis.size for axis in kernel.axes)
    if not kernel.inner or not kernel.outer or whole == ZERO or whole != product(of):
        return None
    kernel = _split(_with_rows_of_all_planes(kernel, shape), name, of)
    found = {
        _axis_name(stride, axis.size, of): at
        for at, (axis, stride) in enumerate(zip(kernel.axes, _strides(kernel, name), strict=True))
    }
    if "" in found or len(found) != len(kernel.axes):
        return None
    order = _order(found, len(kernel.outer))
    return None if order is None else _reordered(kernel, *order)


def _with_rows_of_all_planes(kernel: LoopKernel, shape: Sequence[Dim]) -> LoopKernel:
    """Rows of all planes of a volume as one axis, where everything walks them so."""
    merged = merge(kernel) if len(shape) == VOLUME else kernel
    return merged if merged.outer and merged.inner else kernel


def _strides(kernel: LoopKernel, name: str) -> tuple[Dim, ...]:
    """Along the loop's axes, of the value that the window gives."""
    return next(
        item.access.strides
        for item in kernel.body
        if isinstance(item, Load) and item.access.buffer == name
    )


def _split(kernel: LoopKernel, name: str, of: Result) -> LoopKernel:
    """With axes taken apart that run on from one of the result's into the next."""
    for border in (of.x, of.y * of.x, of.channels * of.y * of.x):
        for at, stride in enumerate(_strides(kernel, name)):
            inner = border.divided_by(stride)
            if inner is not None and inner not in (ONE, kernel.axes[at].size):
                kernel = split_axis(kernel, at, inner) or kernel
    return kernel


def _axis_name(stride: Dim, size: Dim, of: Result) -> str:
    """What an axis of the loop is to the result; nothing if it is part of a row or of images."""
    plane = of.y * of.x
    own = {
        (ONE, of.x): "x",
        (of.x, of.y): "y",
        (plane, of.channels): "channel",
        (of.channels * plane, of.images): "image",
    }
    if (stride, size) in own:
        return own[stride, size]
    above = stride.divided_by(plane)
    if above is not None and above * size == of.channels:
        return "channel"
    return "member" if above == ONE and of.channels.divided_by(size) is not None else ""


def _order(found: Mapping[str, int], n_outer: int) -> tuple[list[Place], list[Place]] | None:
    """The outer and the inner axes in the kernel's order; those of size one are not in `found`."""
    outer = {name for name, at in found.items() if at < n_outer}
    inner = set(found) - outer
    rows: list[Place] = [("y", found.get("y")), ("x", found.get("x"))]
    if inner == {"channel"}:
        return [*_places(found, ["image"]), *rows], [("channel", found["channel"])]
    if "member" in outer or {"channel", "member"} <= inner or not outer.isdisjoint({"y", "x"}):
        return None
    channel: Place = ("channel", found["channel"] if "channel" in outer else None)
    members = [("member", found[name]) for name in ("channel", "member") if name in inner]
    return (
        [*_places(found, outer & {"image"}), channel],
        [*_places(found, inner & {"image"}), *members, *rows],
    )


def _places(found: Mapping[str, int], names: Iterable[str]) -> list[Place]:
    return [(name, found[name]) for name in names if name in found]


def _reordered(kernel: LoopKernel, outer: list[Place], inner: list[Place]) -> LoopKernel:
    def axes(places: list[Place]) -> tuple[Axis, ...]:
        return tuple(Axis(name, ONE if at is None else kernel.axes[at].size) for name, at in places)

    def turned(strides: Strides) -> Strides:
        return tuple(ZERO if at is None else strides[at] for _, at in (*outer, *inner))

    body = restrided(kernel.body, turned)
    return replace(kernel, outer=axes(outer), inner=axes(inner), body=body)
