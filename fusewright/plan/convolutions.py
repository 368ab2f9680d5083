"""From nodes of convolutions and weight gradients to the description of their kernels."""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.convolution import (
    ConvFilter,
    ConvolutionKernel,
    ConvSource,
    Geometry,
    LibraryPass,
    by_eight,
)
from fusewright.ir.graph import Dim, Node, TensorSpec
from fusewright.ir.loop import LoopKernel
from fusewright.ir.weight_gradient import GradientKernel, InputGradient
from fusewright.plan.finish import step_of
from fusewright.plan.staged_pairs import StagedPair
from fusewright.plan.steps import Fused
from fusewright.plan.values import Values
from fusewright.rewrite.convolutions import (
    EAGER_STRIDES,
    geometry_of,
    gradient_geometry,
    library_pass,
)
from fusewright.rewrite.layouts import ROW_BY_ROW
from fusewright.rewrite.matmuls import operands_of

# Output channels of a group that share a tile; 16 of them leave one partial result.
FEWEST_TOGETHER = 64


def convolution_kernel(
    values: Values,
    node: Node,
    epilogue: LoopKernel,
    given: str,
    prologue: LoopKernel | None,
    pair: StagedPair | None,
) -> ConvolutionKernel:
    source, weight = operands_of(node)
    images, filter_ = values.spec(source), values.spec(weight)
    of = pair.back if pair is not None else geometry_of(node, images, filter_)
    return ConvolutionKernel(
        name="",
        summary="",
        geometry=of,
        source=ConvSource(source, _five(images)),
        filter=_filter(weight, filter_, of),
        epilogue=epilogue,
        prologue=prologue,
        accumulator=given,
        staged=pair.staged if pair is not None else "",
        instead=_instead(node, *_in_eager_mode(node, images, filter_)),
    )


def loses_by_reducing(values: Values, node: Node) -> bool:
    """Whether a convolution that reduces would be slower. Without reduction it may use plain sums
    or rows of weights by eight. Groups of few channels would each leave a partial result."""
    source, weight = operands_of(node)
    of = geometry_of(node, values.spec(source), values.spec(weight))
    few = of.groups > 1 and of.results < FEWEST_TOGETHER
    return few or bool(node.argument(ROW_BY_ROW)) or by_eight(of) != of


def gradient_step(
    values: Values, node: Node, pair: StagedPair | None, other: Fused | None
) -> Fused:
    """`other` is the step of the pair's input gradient."""
    back = other.kernel if other is not None else None
    assert back is None or isinstance(back, ConvolutionKernel), "a pair has a convolution"
    source, grad_output = operands_of(node)
    images, grad_output_spec, weights = (
        values.spec(name) for name in (source, grad_output, node.name)
    )
    of = pair.of if pair is not None else gradient_geometry(node, images, grad_output_spec)
    kernel = GradientKernel(
        name="custom_convolution_gradient",
        summary="convolution's gradient by its weights",
        geometry=of,
        source=ConvSource(source, _five(images)),
        grad_output=ConvSource(grad_output, _five(grad_output_spec)),
        filter=_filter(node.name, weights, of),
        symbols=tuple(sorted(values.sizes)),
        # For a transposed convolution, `grad_output` is its input.
        instead=_instead(
            node, _in_eager_mode(node, images, grad_output_spec)[_is_transposed(node)], weights
        ),
        prologue=back.prologue if back is not None else None,
        back=InputGradient(back.walked, back.staged) if back is not None else None,
    )
    return step_of(kernel, (node.name,), ("convolution_gradient",), values)


def _in_eager_mode(node: Node, *specs: TensorSpec) -> list[TensorSpec]:
    """The operands in eager mode's layout, which decides the precision of cuDNN's kernel."""
    given = node.argument(EAGER_STRIDES)
    assert isinstance(given, tuple)
    found = []
    for spec, strides in zip(specs, given, strict=True):
        assert isinstance(strides, tuple)
        dims = tuple(each for each in strides if isinstance(each, Dim))
        found.append(replace(spec, strides=dims))
    return found


def _instead(node: Node, source: TensorSpec, weight: TensorSpec) -> LibraryPass:
    which, numbers = library_pass(node)
    if which == "input":  # the operator's input is our result
        assert node.spec is not None
        source = node.spec
    return LibraryPass(which, source, weight, numbers)


def _is_transposed(node: Node) -> bool:
    _, numbers = library_pass(node)
    return bool(numbers[3])


def _five(spec: TensorSpec) -> tuple[Dim, Dim, Dim, Dim, Dim]:
    """Strides along images, channels, z, y and x; missing axes have stride 0."""
    image, channel, *rest = spec.strides
    z, y, x = [Dim(0)] * (3 - len(rest)) + rest
    return image, channel, z, y, x


def _filter(name: str, spec: TensorSpec, of: Geometry) -> ConvFilter:
    """A transposed convolution's weights have input channels first."""
    first, second, z, y, x = (each.factor for each in _five(spec))
    if of.transposed:
        return ConvFilter(name, (of.channels * first, second, first, z, y, x))
    return ConvFilter(name, (of.results * first, first, second, z, y, x))
