"""Forward and inference as one function: what both run is written once.

`saves` says at a call whether the values that backward reads are wanted. Steps that only forward
runs stand under `if saves`, those that only inference runs under its `else`. Each of the two runs
its own steps in its own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.emit.steps import SAVES, Demand, Demands, read_by_loops
from fusewright.plan.steps import Call, Fused, Plan, Step

_INFERENCE, _FORWARD = frozenset({0}), frozenset({1})
_NAMES = {_FORWARD: SAVES, _INFERENCE: f"not {SAVES}"}


@dataclass(frozen=True)
class Part:
    """A plan, the demands for its values, and the results of it that are asked for."""

    plan: Plan
    found: Demands
    results: Sequence[int]

    def live(self) -> list[Step]:
        return [step for step in self.plan.steps if self.found.step(step)]


def joined(forward: Part, inference: Part) -> tuple[Plan, Demands] | None:
    """The steps of both with their demands. None if the two have too little in common."""
    both = zip(inference.results, forward.results, strict=False)
    if any(inference.plan.outputs[i] != forward.plan.outputs[f] for i, f in both):
        return None
    ours, theirs = ({_key(step): step for step in part.live()} for part in (forward, inference))
    common = [key for key in ours if key in theirs and _has_results(ours[key], theirs[key])]
    if 2 * len(common) < len(theirs) or common != [key for key in theirs if key in set(common)]:
        return None
    if not _alike_in_memory(forward.plan, inference, [ours[key] for key in common]):
        return None
    steps = list(_in_order(ours, theirs, common))
    specs = {**dict(inference.plan.specs), **dict(forward.plan.specs)}
    plan = replace(forward.plan, steps=tuple(steps), specs=tuple(specs.items()))
    return plan, _demands(forward, inference, [ours[key] for key in common])


def _alike_in_memory(forward: Plan, inference: Part, common: Sequence[Step]) -> bool:
    """Whether values of one name lie alike in both, and no result of a common PyTorch call would be
    laid out in inference for what only forward does with it."""
    specs = dict(forward.specs)
    if any(specs.get(name, spec) != spec for name, spec in inference.plan.specs):
        return False
    wanted = {inference.plan.outputs[at] for at in inference.results}
    saved = [each for each in forward.outputs if isinstance(each, str) and each not in wanted]
    more = read_by_loops(forward, saved) - read_by_loops(inference.plan)
    return not any(more & {*step.outputs} for step in common if isinstance(step, Call))


def _key(step: Step) -> object:
    if isinstance(step, Fused):
        return step.kernel.name, step.inputs, step.outputs
    return step.node


def _has_results(step: Step, other: Step) -> bool:
    """Whether a step names the results that the other one names."""
    return not isinstance(step, Call) or set(other.outputs) <= {*step.outputs, ""}


def _in_order(
    ours: Mapping[object, Step], theirs: Mapping[object, Step], common: Sequence[object]
) -> Iterator[Step]:
    """The steps of both, each in their own order."""
    others = iter(theirs.items())
    left = iter(ours.items())
    for at in [*common, None]:
        for key, step in left:
            if key == at:
                break
            yield step
        for key, step in others:
            if key == at:
                break
            yield step
        if at is not None:
            yield ours[at]


def _demands(forward: Part, inference: Part, common: Sequence[Step]) -> Demands:
    """Which values forward needs, and which inference."""
    parts = ((inference, _INFERENCE), (forward, _FORWARD))
    of: dict[str, Demand] = {}
    apart: dict[int, Demand] = {}
    for part, mark in parts:
        for name, demand in part.found.of.items():
            of[name] = of.get(name, frozenset()) | (mark if demand else frozenset())
        apart |= {id(step): mark for step in part.live()}
    apart |= {id(step): _INFERENCE | _FORWARD for step in common}
    return Demands(of, _INFERENCE | _FORWARD, apart, _NAMES)
