"""From `window` and `window_gradient` nodes to the description of their kernels."""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.convolution import (
    Filter,
    Geometry,
    Instead,
    Source,
    WindowKernel,
    by_eight,
)
from fusewright.ir.graph import Dim, Node, TensorSpec
from fusewright.ir.loop import LoopKernel
from fusewright.ir.weight_gradient import Back, GradientKernel
from fusewright.plan.staged_pairs import LinePair
from fusewright.plan.steps import Ended, Window, WindowGradient
from fusewright.plan.values import Values
from fusewright.rewrite.convolutions import LIES, geometry_of, gradient_geometry, library_pass
from fusewright.rewrite.layouts import ROW_BY_ROW
from fusewright.rewrite.matmuls import operands_of

FEWEST_TOGETHER = 64  # channels of a group that a tile has, of which 16 leave one part


def window_kernel(
    values: Values,
    node: Node,
    epilogue: LoopKernel,
    given: str,
    prologue: LoopKernel | None,
    pair: LinePair | None,
) -> WindowKernel:
    source, weight = operands_of(node)
    images, filter_ = values.spec(source), values.spec(weight)
    of = pair.back if pair is not None else geometry_of(node, images, filter_)
    return WindowKernel(
        name="",
        summary="",
        geometry=of,
        source=Source(source, _five(images)),
        filter=_filter(weight, filter_, of),
        epilogue=epilogue,
        prologue=prologue,
        product=given,
        lines=pair.lines if pair is not None else "",
        instead=_instead(node, *_in_eager_mode(node, images, filter_)),
    )


def loses_by_reducing(values: Values, node: Node) -> bool:
    """Whether a window that reduces nothing goes about it in a faster way, as plain sums or with
    its weights by eight; or has groups of few channels, each of which would leave a part."""
    source, weight = operands_of(node)
    of = geometry_of(node, values.spec(source), values.spec(weight))
    few = of.groups > 1 and of.results < FEWEST_TOGETHER
    return few or bool(node.argument(ROW_BY_ROW)) or by_eight(of) != of


def gradient_step(
    values: Values, node: Node, pair: LinePair | None, other: Ended | None
) -> WindowGradient:
    """`other` is the step of the other gradient of a pair."""
    window = other.kernel if isinstance(other, Window) else None
    source, change = operands_of(node)
    images, changes, weights = (values.spec(name) for name in (source, change, node.name))
    of = pair.of if pair is not None else gradient_geometry(node, images, changes)
    kernel = GradientKernel(
        name="custom_convolution_gradient",
        summary="convolution's gradient by its weights",
        geometry=of,
        source=Source(source, _five(images)),
        change=Source(change, _five(changes)),
        filter=_filter(node.name, weights, of),
        symbols=tuple(sorted(values.sizes)),
        # What a transposed convolution is given is `change`.
        instead=_instead(
            node, _in_eager_mode(node, images, changes)[_is_transposed(node)], weights
        ),
        prologue=window.prologue if window is not None else None,
        back=Back(window.walked, window.lines) if window is not None else None,
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


def _in_eager_mode(node: Node, *specs: TensorSpec) -> list[TensorSpec]:
    """The operands as they lie there: by that the library decides how precise it is."""
    lies = node.argument(LIES)
    assert isinstance(lies, tuple)
    found = []
    for spec, strides in zip(specs, lies, strict=True):
        assert isinstance(strides, tuple)
        dims = tuple(each for each in strides if isinstance(each, Dim))
        found.append(replace(spec, strides=dims))
    return found


def _instead(node: Node, source: TensorSpec, weight: TensorSpec) -> Instead:
    which, numbers = library_pass(node)
    if which == "input":  # what it slides over is the result
        assert node.spec is not None
        source = node.spec
    return Instead(which, source, weight, numbers)


def _is_transposed(node: Node) -> bool:
    _, numbers = library_pass(node)
    return bool(numbers[3])


def _five(spec: TensorSpec) -> tuple[Dim, Dim, Dim, Dim, Dim]:
    """Strides along images, channels, z, y and x; an image may have fewer dimensions."""
    image, channel, *rest = spec.strides
    z, y, x = [Dim(0)] * (3 - len(rest)) + rest
    return image, channel, z, y, x


def _filter(name: str, spec: TensorSpec, of: Geometry) -> Filter:
    """A transposed convolution's weights have the channels first."""
    first, second, z, y, x = (each.factor for each in _five(spec))
    if of.transposed:
        return Filter(name, (of.channels * first, second, first, z, y, x))
    return Filter(name, (of.results * first, first, second, z, y, x))
