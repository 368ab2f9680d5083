"""From `window` and `window_gradient` nodes to the description of their kernels."""

from __future__ import annotations

from fusewright.ir import Dim, Node, TensorSpec
from fusewright.loop import LoopKernel
from fusewright.plan.steps import WindowGradient
from fusewright.plan.values import Values
from fusewright.rewrite.products import operands_of
from fusewright.rewrite.windows import (
    geometry_of,
    gradient_geometry,
    library_pass,
    reads_backwards,
)
from fusewright.window import Filter, GradientKernel, Instead, Source, WindowKernel


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
        instead=_instead(node, images, filter_),
    )


def gradient_step(values: Values, node: Node) -> WindowGradient:
    source, change = operands_of(node)
    images, changes, weights = (values.spec(name) for name in (source, change, node.name))
    of = gradient_geometry(node, images, changes)
    kernel = GradientKernel(
        name="custom_convolution_gradient",
        summary="convolution's gradient by its weights",
        geometry=of,
        source=Source(source, _four(images)),
        change=Source(change, _four(changes)),
        filter=_filter(node.name, weights, backwards=False),
        symbols=tuple(sorted(values.sizes)),
        instead=_instead(node, images, weights),
    )
    numbers = of.source_elements(values.sizes) + of.result_elements(values.sizes)
    return WindowGradient(
        name=kernel.name,
        kernel=kernel,
        inputs=tuple(each.name for each in kernel.arguments if not each.is_output),
        outputs=(node.name,),
        operators=("convolution_gradient",),
        bytes_moved=4 * (numbers + of.filter_elements),
        operations=of.operations(values.sizes),
    )


def _instead(node: Node, source: TensorSpec, weight: TensorSpec) -> Instead:
    which, numbers = library_pass(node)
    if which == "input":  # what it slides over is the result
        assert node.spec is not None
        source = node.spec
    return Instead(which, source, weight, numbers)


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
