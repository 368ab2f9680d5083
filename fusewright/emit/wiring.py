"""Which value of a plan becomes what: outputs, new buffer values, values saved for backward.

Results of the forward driver are, in order: outputs that a kernel or operator made, each once;
new values of mutated bindings; what backward needs and cannot take from an input or an output.
Outputs that are inputs, or views of inputs, never enter the autograd function: they are formed
outside of it, where PyTorch's own autograd sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusewright.emit.bundle import ProgramPlans
from fusewright.ir.graph import Dim
from fusewright.plan.steps import Plan, View, inputs_of


@dataclass(frozen=True)
class FromInput:
    """Binding `index`, seen through `views` in order."""

    index: int
    views: tuple[View, ...]


@dataclass(frozen=True)
class FromResult:
    """Result `index` of the forward driver."""

    index: int


Origin = FromInput | FromResult | Dim | None


@dataclass(frozen=True)
class Wiring:
    """`results` are positions among the graph's outputs; `clones` of them must be copied.

    `reach` holds, for a result that not every gradient depends on, the bindings whose do.
    """

    results: tuple[int, ...]
    n_outputs: int
    n_inference: int
    outputs: tuple[Origin, ...]
    fixed: tuple[int, ...]
    detached: tuple[int, ...]
    mutations: tuple[tuple[int, int], ...]
    saved: tuple[Origin, ...]
    clones: frozenset[int]
    tangents: tuple[int | None, ...]
    reach: tuple[tuple[int, tuple[int, ...]], ...]


def rests_on(plan: Plan, value: str) -> FromInput | None:
    """The input that `value` is, or is a view of; None when it has memory of its own."""
    positions = {each.name: index for index, each in enumerate(plan.inputs)}
    views = {step.name: step for step in plan.steps if isinstance(step, View)}
    chain: list[View] = []
    while value in views:
        sources = inputs_of(views[value])
        if len(sources) != 1 or views[value].node.op == "getitem":
            return None
        chain.append(views[value])
        value = sources[0]
    return FromInput(positions[value], tuple(reversed(chain))) if value in positions else None


def wire(plans: ProgramPlans) -> Wiring:
    """Sort a program's results."""
    program, plan = plans.program, plans.forward
    kinds: Mapping[str, list[int]] = {
        kind: [i for i, result in enumerate(program.results) if result.kind == kind]
        for kind in ("output", "mutation", "saved")
    }
    results: list[int] = []
    outputs = _outputs(plans, kinds["output"], results)
    n_outputs = len(results)
    mutated = {program.results[i].index: i for i in kinds["mutation"]}
    mutations = tuple((binding, n_outputs + k) for k, binding in enumerate(mutated))
    results += mutated.values()
    n_inference = len(results)
    values = {plan.outputs[i]: k for k, i in enumerate(results)}
    saved: list[Origin] = []
    for position in kinds["saved"]:
        value = plan.outputs[position]
        if not isinstance(value, str):
            saved.append(value)
            continue
        origin = rests_on(plan, value)
        if origin is None or origin.index in mutated:
            if value not in values:
                values[value] = len(results)
                results.append(position)
            saved.append(FromResult(values[value]))
        else:
            saved.append(origin)
    made = {i: k for k, i in enumerate(results[:n_outputs])}
    differentiable = {made.get(_same_as(plan, results[:n_outputs], i)) for i in program.tangents}
    by_position = dict(zip(kinds["output"], outputs, strict=True))
    return Wiring(
        results=tuple(results),
        n_outputs=n_outputs,
        n_inference=n_inference,
        outputs=_ordered(plans, by_position),
        fixed=tuple(k for k in range(n_outputs) if k not in differentiable),
        detached=tuple(
            program.results[i].index
            for i, origin in by_position.items()
            if isinstance(origin, FromInput)
            and i not in program.tangents
            and program.bindings[origin.index].differentiable
        ),
        mutations=mutations,
        saved=tuple(saved),
        clones=_clones(plans, results, frozenset(mutated)),
        tangents=_tangents(plans, results[:n_outputs]),
        reach=_reach(plans, results[:n_outputs]),
    )


def _clones(plans: ProgramPlans, results: list[int], mutated: frozenset[int]) -> frozenset[int]:
    """Results that look at the memory of a mutated binding: they are its value of before."""
    origins = [rests_on(plans.forward, str(plans.forward.outputs[i])) for i in results]
    return frozenset(
        k for k, origin in enumerate(origins) if origin is not None and origin.index in mutated
    )


def _outputs(plans: ProgramPlans, positions: list[int], results: list[int]) -> list[Origin]:
    """The origin of each output in turn; fills `results` with those that the driver makes."""
    plan = plans.forward
    known: dict[str, int] = {}
    origins: list[Origin] = []
    mutated = {each.index for each in plans.program.results if each.kind == "mutation"}
    for position in positions:
        value = plan.outputs[position]
        if not isinstance(value, str):
            origins.append(value)
            continue
        origin = rests_on(plan, value)
        if origin is None or origin.index in mutated:
            if value not in known:
                known[value] = len(results)
                results.append(position)
            origins.append(FromResult(known[value]))
        else:
            origins.append(origin)
    return origins


def _ordered(plans: ProgramPlans, by_position: Mapping[int, Origin]) -> tuple[Origin, ...]:
    """Outputs in the order of their place in the user's structure."""
    program = plans.program
    return tuple(
        by_position[position]
        for position in sorted(by_position, key=lambda i: program.results[i].index)
    )


def _same_as(plan: Plan, results: list[int], position: int) -> int:
    """The first result position that holds the same value, or the position itself."""
    return next((i for i in results if plan.outputs[i] == plan.outputs[position]), position)


def _tangents(plans: ProgramPlans, results: list[int]) -> tuple[int | None, ...]:
    """For each tangent the result it belongs to; None where autograd does that part itself.

    A value that is returned twice is one result: its gradients are summed before they come here,
    so the first tangent takes the sum and the others are zero.
    """
    found: list[int | None] = []
    for position in plans.program.tangents:
        first = _same_as(plans.forward, results, position)
        index = results.index(first) if first in results else None
        found.append(None if index in found else index)
    return tuple(found)


def _reach(plans: ProgramPlans, results: list[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    program, backward = plans.program, plans.backward
    if backward is None:
        return ()
    # Also a parameter that nothing uses makes autograd ask for a gradient.
    everything = {i for i, each in enumerate(program.bindings) if each.differentiable}
    found: dict[int, set[int]] = {}
    for position, bindings in zip(program.tangents, program.reach, strict=False):
        first = _same_as(plans.forward, results, position)
        if first in results:
            found.setdefault(results.index(first), set()).update(bindings)
    return tuple((k, tuple(sorted(b))) for k, b in found.items() if not b >= everything)
