"""The windows around each element of an image, as views: what the gradient of a pool gathers from.

Element i of an axis is q·stride + r, and belongs to the windows q + j for a few j (`Along.around`).
The image is viewed as (q, r) along each axis. A size that is no multiple of the stride is padded,
and cut off at the end.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import ONE, Dim, Node, Ref, contiguous_strides
from fusewright.ir.pool_offsets import Window
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.padding import padded
from fusewright.rewrite.pooling import every_step


def steps_of(node: Node, window: Window) -> list[int]:
    """How many q there are along each axis of the gradient."""
    assert node.spec is not None
    sizes = [size.factor for size in node.spec.shape[-len(window) :]]
    return [-(-size // along.stride) for size, along in zip(sizes, window, strict=True)]


def split_by_strides(node: Node, window: Window, steps: list[int]) -> Node:
    """The node with the axes q and r instead of each axis of the image."""
    assert node.spec is not None
    split = [
        Dim(each) for q, along in zip(steps, window, strict=True) for each in (q, along.stride)
    ]
    shape = (*node.spec.shape[: -len(window)], *split)
    return replace(node, spec=replace(node.spec, shape=shape, strides=contiguous_strides(shape)))


def surrounded(
    builder: Builder, node: Node, value: Ref, window: Window, steps: list[int], outside: int
) -> Ref:
    """A value of each window, padded with empty windows wherever one outside the image is read."""
    shape = builder.spec(value.name).shape
    pairs = [(0, 0)] * (len(shape) - len(window))
    for many, along, q in zip(shape[-len(window) :], window, steps, strict=True):
        after = q + along.around[-1] - many.factor
        pairs.append((max(0, -along.around[0]), max(0, after)))
    named = replace(node, name=f"{node.name}_around", spec=None)
    found = padded(builder, named, value, tuple(pairs), outside)
    assert found is not None
    return found


def at_windows(
    builder: Builder,
    node: Node,
    value: Ref,
    window: Window,
    windows: tuple[int, ...],
    steps: list[int],
) -> Ref:
    """Window q + j for each q, with an axis of size one for r."""
    assert node.spec is not None
    held = builder.spec(value.name)
    lead = held.shape[: -len(window)]
    like = replace(node, spec=replace(held, shape=(*lead, *map(Dim, steps))))
    for axis, (j, along) in enumerate(zip(windows, window, strict=True), len(lead)):
        value = every_step(builder, like, value, axis, j + max(0, -along.around[0]), 1)
    shape = (*lead, *(size for q in steps for size in (Dim(q), ONE)))
    return builder.view(node, value, shape, contiguous_strides(shape))


def joined_axes(builder: Builder, node: Node, value: Ref, window: Window, steps: list[int]) -> Ref:
    """The image of all q and r, cut to its size."""
    assert node.spec is not None
    lead = node.spec.shape[: -len(window)]
    full = [Dim(q * along.stride) for q, along in zip(steps, window, strict=True)]
    value = builder.view(node, value, (*lead, *full), contiguous_strides((*lead, *full)))
    for axis in range(len(lead), len(node.spec.shape)):
        value = every_step(builder, node, value, axis, 0, 1)
    return builder.point(node, "cast", (value,), node.spec.dtype)
