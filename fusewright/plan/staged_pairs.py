"""Both gradients of a convolution where they read the same lines of halves: the one by its source
lays out the gradient of its result, and the one by its weights reads that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fusewright.cost.conv_direct import has_plane_gradient
from fusewright.cost.conv_staged import with_shared_lines
from fusewright.cost.convolution import prefers_shared
from fusewright.ir.convolution import Geometry
from fusewright.ir.graph import Node
from fusewright.plan.fuse import makes_cycle
from fusewright.plan.values import Values
from fusewright.rewrite.convolutions import geometry_of, gradient_geometry
from fusewright.rewrite.layouts import GRADIENT, ROW_BY_ROW, WINDOW
from fusewright.rewrite.matmuls import operands_of


@dataclass(frozen=True)
class LinePair:
    """The sizes of both, as they share lines, and what those are called."""

    window: str
    gradient: str
    of: Geometry
    back: Geometry
    lines: str


@dataclass(frozen=True)
class LinePairs:
    pairs: tuple[LinePair, ...] = ()

    @cached_property
    def by_window(self) -> Mapping[str, LinePair]:
        return {each.window: each for each in self.pairs}

    @cached_property
    def by_gradient(self) -> Mapping[str, LinePair]:
        return {each.gradient: each for each in self.pairs}


def pairs_of(values: Values, places: Sequence[tuple[str, ...]]) -> LinePairs:
    """Those that are expected to be faster so; `places` are values that are computed together.

    None may wait for itself: as far as that goes, a pair is computed together from then on.
    """
    found: dict[str, LinePair] = {}
    for gradient in values.graph.nodes:
        if gradient.op != GRADIENT:
            continue
        _, change = operands_of(gradient)
        for user in values.users.get(change, ()):
            pair = _pair(values, user, gradient) if _reads(user, change) else None
            if pair is None or user.name in found:
                continue
            own = next((each for each in places if user.name in each), (user.name,))
            other, rest = (gradient.name,), [each for each in places if user.name not in each]
            if not makes_cycle(values, [*rest, own, other], own, other):
                found[user.name], places = pair, (*rest, (*own, *other))
                break
    return LinePairs(tuple(found.values()))


def _reads(node: Node, change: str) -> bool:
    thin = node.op == WINDOW and bool(node.argument(ROW_BY_ROW))
    return node.op == WINDOW and not thin and operands_of(node)[0] == change


def _pair(values: Values, window: Node, gradient: Node) -> LinePair | None:
    source, change = (values.spec(name) for name in operands_of(gradient))
    of = gradient_geometry(gradient, source, change)
    back = geometry_of(window, change, values.spec(operands_of(window)[1]))
    if back != of.turned_back or has_plane_gradient(of):
        return None
    if not prefers_shared(of, back, values.sizes):
        return None
    of, back = with_shared_lines(of, back)
    return LinePair(window.name, gradient.name, of, back, _unused(values, f"{window.name}_lines"))


def _unused(values: Values, name: str) -> str:
    taken = {*values.inputs, *values.nodes}
    while name in taken:
        name += "_"
    return name
