"""The record of weight gradients: gradients of convolutions with respect to their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusewright.codegen.weight_gradient import render_weight_gradient, weight_gradient_workspace
from fusewright.cost.conv_direct import MOST_PARTS, has_depthwise_gradient
from fusewright.cost.conv_staged import staged_spec
from fusewright.ir.graph import Sizes
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.kinds.convolution import band_fits, filter_elements, image_elements, source_counts
from fusewright.kinds.kind import Kind
from fusewright.kinds.loop import largest
from fusewright.schedule.tensor_core import GradientSchedule, choose_gradient
from fusewright.target.target import Target


def _permits(kernel: GradientKernel, choice: GradientSchedule, target: Target) -> bool:
    if choice.parts < 1:
        return False
    if has_depthwise_gradient(kernel.geometry):
        return choice.band_width == 0 and choice.parts <= MOST_PARTS
    if kernel.back is not None:
        return choice.band_width == kernel.geometry.x.result
    return band_fits(kernel.geometry, choice.band_width)


def _variations(
    kernel: GradientKernel, first: GradientSchedule, target: Target, sizes: Sizes
) -> Iterator[GradientSchedule]:
    if kernel.back is not None:  # Trials run in float32's precision, which stages no input.
        return
    yield from (replace(first, parts=max(1, first.parts * each // 4)) for each in (2, 3, 8))


def _elements(kernel: GradientKernel, sizes: Sizes) -> dict[str, int]:
    of = kernel.geometry
    gradients = (of.images.at(sizes), of.groups * of.results, *(axis.result for axis in of.axes))
    found = largest(
        *image_elements(kernel.source, source_counts(of, sizes), None, sizes),
        *image_elements(kernel.grad_output, gradients, kernel.prologue, sizes),
        filter_elements(of, kernel.filter),
    )
    if kernel.back is not None:
        found[kernel.back.staged] = staged_spec(kernel.back.geometry, "").numel.at(sizes)
    return found


WEIGHT_GRADIENT = Kind(
    kernel=GradientKernel,
    words="weight gradient kernel",
    schedules={"weight_gradient": GradientSchedule},
    choose=choose_gradient,
    permits=_permits,
    variations=_variations,
    workspace=lambda kernel, choice, target: weight_gradient_workspace(kernel, choice),
    render=lambda kernel, choice, target: render_weight_gradient(kernel, choice),
    elements=_elements,
    summands=lambda kernel, sizes: kernel.geometry.images.at(sizes) * kernel.geometry.pixels,
)
