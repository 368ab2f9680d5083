"""Which reductions of a convolution's result its own kernel can compute.

A result has images, channels and positions y and x. Besides pointwise operators, a tile can reduce

    over positions    of each channel, for all images or for each image; neighbouring channels, or
                      all of them, may be reduced together: batch, instance, group and layer norm,
                      pooling
    over channels     of each position

`convolution_reduction` alone decides this. It renames the loop's axes to `image`, `channel`,
`member` (of channels that are reduced together), `y` and `x`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fusewright.ir.graph import ONE, ZERO, Dim, product
from fusewright.ir.loop import Axis, Load, LoopKernel
from fusewright.schedule.coalesce import Strides, merge, restrided, split_axis

VOLUME = 5  # dimensions of a result with three spatial axes
# A new axis of the loop: its name and its old position; None for an axis of size one.
NamedAxis = tuple[str, int | None]


class OutputSizes(NamedTuple):
    """The sizes of a convolution's result. A 1-d image is a single row; a 3-d one has the rows of
    all its planes."""

    images: Dim
    channels: Dim
    y: Dim
    x: Dim


def convolution_reduction(kernel: LoopKernel, name: str, shape: Sequence[Dim]) -> LoopKernel | None:
    """A loop that reduces the result of convolution `name`, over its kernel's axes, or None."""
    of = OutputSizes(shape[0], shape[1], product(shape[2:-1]), shape[-1])
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
    """Merge the rows of all planes of a volume into one axis, if every access allows it."""
    merged = merge(kernel) if len(shape) == VOLUME else kernel
    return merged if merged.outer and merged.inner else kernel


def _strides(kernel: LoopKernel, name: str) -> tuple[Dim, ...]:
    """Strides along the loop's axes of the convolution's result."""
    return next(
        item.access.strides
        for item in kernel.body
        if isinstance(item, Load) and item.access.buffer == name
    )


def _split(kernel: LoopKernel, name: str, of: OutputSizes) -> LoopKernel:
    """Split axes that run across more than one dimension of the result."""
    for border in (of.x, of.y * of.x, of.channels * of.y * of.x):
        for at, stride in enumerate(_strides(kernel, name)):
            inner = border.divided_by(stride)
            if inner is not None and inner not in (ONE, kernel.axes[at].size):
                kernel = split_axis(kernel, at, inner) or kernel
    return kernel


def _axis_name(stride: Dim, size: Dim, of: OutputSizes) -> str:
    """Which dimension of the result an axis is; "" if it is a part of a row or of images."""
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


def _order(
    found: Mapping[str, int], n_outer: int
) -> tuple[list[NamedAxis], list[NamedAxis]] | None:
    """The outer and inner axes in the kernel's order; axes of size one are not in `found`."""
    outer = {name for name, at in found.items() if at < n_outer}
    inner = set(found) - outer
    rows: list[NamedAxis] = [("y", found.get("y")), ("x", found.get("x"))]
    if inner == {"channel"}:
        return [*_present(found, ["image"]), *rows], [("channel", found["channel"])]
    if "member" in outer or {"channel", "member"} <= inner or not outer.isdisjoint({"y", "x"}):
        return None
    channel: NamedAxis = ("channel", found["channel"] if "channel" in outer else None)
    members = [("member", found[name]) for name in ("channel", "member") if name in inner]
    return (
        [*_present(found, outer & {"image"}), channel],
        [*_present(found, inner & {"image"}), *members, *rows],
    )


def _present(found: Mapping[str, int], names: Iterable[str]) -> list[NamedAxis]:
    return [(name, found[name]) for name in names if name in found]


def _reordered(kernel: LoopKernel, outer: list[NamedAxis], inner: list[NamedAxis]) -> LoopKernel:
    def axes(named: list[NamedAxis]) -> tuple[Axis, ...]:
        return tuple(Axis(name, ONE if at is None else kernel.axes[at].size) for name, at in named)

    def permuted(strides: Strides) -> Strides:
        return tuple(ZERO if at is None else strides[at] for _, at in (*outer, *inner))

    body = restrided(kernel.body, permuted)
    return replace(kernel, outer=axes(outer), inner=axes(inner), body=body)
