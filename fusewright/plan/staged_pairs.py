"""Pairs of gradients of a convolution that share one staged input: the input gradient stages
`grad_output` as fp16, and the weight gradient reads the same copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fusewright.cost.conv_direct import has_depthwise_gradient
from fusewright.cost.conv_staged import with_shared_staging
from fusewright.cost.convolution import prefers_shared
from fusewright.ir.convolution import Geometry
from fusewright.ir.graph import Node
from fusewright.plan.dependencies import Dependencies
from fusewright.plan.values import Values
from fusewright.rewrite.convolutions import geometry_of, gradient_geometry
from fusewright.rewrite.layouts import CONVOLUTION, GRADIENT, ROW_BY_ROW
from fusewright.rewrite.matmuls import operands_of


@dataclass(frozen=True)
class StagedPair:
    """The geometries of both, as they share the staged input, and its name."""

    convolution: str
    gradient: str
    of: Geometry
    back: Geometry
    staged: str


@dataclass(frozen=True)
class StagedPairs:
    pairs: tuple[StagedPair, ...] = ()

    @cached_property
    def by_convolution(self) -> Mapping[str, StagedPair]:
        return {each.convolution: each for each in self.pairs}

    @cached_property
    def by_gradient(self) -> Mapping[str, StagedPair]:
        return {each.gradient: each for each in self.pairs}


def pairs_of(values: Values, units: Sequence[tuple[str, ...]]) -> StagedPairs:
    """The pairs that are expected to be faster; `units` are values that are computed together.

    A pair counts as one unit from then on, so that no unit waits for itself.
    """
    found: dict[str, StagedPair] = {}
    dependencies = Dependencies(values, units)
    for gradient in values.graph.nodes:
        if gradient.op != GRADIENT:
            continue
        _, grad_output = operands_of(gradient)
        for user in values.users.get(grad_output, ()):
            pair = _pair(values, user, gradient) if _reads(user, grad_output) else None
            if pair is None or user.name in found:
                continue
            if not dependencies.makes_cycle(user.name, gradient.name):
                dependencies.join(user.name, gradient.name)
                found[user.name] = pair
                break
    return StagedPairs(tuple(found.values()))


def _reads(node: Node, grad_output: str) -> bool:
    thin = node.op == CONVOLUTION and bool(node.argument(ROW_BY_ROW))
    return node.op == CONVOLUTION and not thin and operands_of(node)[0] == grad_output


def _pair(values: Values, convolution: Node, gradient: Node) -> StagedPair | None:
    source, grad_output = (values.spec(name) for name in operands_of(gradient))
    of = gradient_geometry(gradient, source, grad_output)
    weight = values.spec(operands_of(convolution)[1])
    back = geometry_of(convolution, grad_output, weight)
    if back != of.input_gradient or has_depthwise_gradient(of):
        return None
    if not prefers_shared(of, back, values.sizes, values.target):
        return None
    of, back = with_shared_staging(of, back)
    staged = _unused(values, f"{convolution.name}_lines")
    return StagedPair(convolution.name, gradient.name, of, back, staged)


def _unused(values: Values, name: str) -> str:
    while name in values.inputs or name in values.nodes:
        name += "_"
    return name
