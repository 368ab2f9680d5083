"""From a `window` node to the description of its kernel."""

from __future__ import annotations

from fusewright.ir import Dim, Node, TensorSpec
from fusewright.loop import LoopKernel
from fusewright.plan.values import Values
from fusewright.rewrite.products import operands_of
from fusewright.rewrite.windows import geometry_of, reads_backwards
from fusewright.window import Filter, Source, WindowKernel


def window_kernel(values: Values, node: Node, epilogue: LoopKernel, given: str) -> WindowKernel:
    source, weight = operands_of(node)
    images, filter_ = values.spec(source), values.spec(weight)
    return WindowKernel(
        name="",
        summary="",
        geometry=geometry_of(node, images, filter_),
        source=Source(source, _four(images)),
        filter=_filter(weight, filter_, reads_backwards(node)),
        epilogue=epilogue,
        product=given,
    )


def _four(spec: TensorSpec) -> tuple[Dim, Dim, Dim, Dim]:
    """Strides along images, channels, y and x; an image of one dimension is a single row."""
    image, channel, *rows, x = spec.strides
    return image, channel, rows[0] if rows else Dim(0), x


def _filter(name: str, spec: TensorSpec, backwards: bool) -> Filter:
    strides = [each.factor for each in _four(spec)]
    if not backwards:
        return Filter(name, (strides[0], strides[1], strides[2], strides[3]), 0)
    last = [size.factor - 1 for size in spec.shape[2:]]
    offset = sum(at * step for at, step in zip(reversed(last), reversed(strides), strict=False))
    return Filter(name, (strides[1], strides[0], -strides[2], -strides[3]), offset)
