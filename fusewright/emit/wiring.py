"""What each result of a plan is for: an output, a new buffer value, or a value saved for backward.

The results of the forward driver are, in order: outputs that a kernel or operator computes, each
once; new values of mutated bindings; further values that backward needs, except inputs. Outputs
that are inputs, or views of inputs, are formed outside of the autograd function, where PyTorch's
own autograd sees them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from fusewright.emit.bundle import ProgramPlans
from fusewright.ir.graph import Dim
from fusewright.plan.steps import Plan, View, inputs_of


@dataclass(frozen=True)
class FromInput:
    """Binding `index`, after `views` in this order."""

    index: int
    views: tuple[View, ...]


@dataclass(frozen=True)
class FromResult:
    """Result `index` of the forward driver."""

    index: int


Origin = FromInput | FromResult | Dim | None


@dataclass(frozen=True)
class Wiring:
    """`results` are positions in the graph's outputs. Those in `clones` must be copied.

    `reach` holds the bindings whose gradients depend on a result, unless all gradients do.
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


class _Memory:
    """Which values of a plan are inputs, or views of inputs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._positions = {each.name: index for index, each in enumerate(plan.inputs)}
        self._views = {step.name: step for step in plan.steps if isinstance(step, View)}

    def origin(self, value: str) -> FromInput | None:
        """The input that `value` is, or is a view of. None if it has its own memory."""
        chain: list[View] = []
        while value in self._views:
            view = self._views[value]
            sources = inputs_of(view)
            if len(sources) != 1 or view.node.op == "getitem":
                return None
            chain.append(view)
            value = sources[0]
        if value not in self._positions:
            return None
        return FromInput(self._positions[value], tuple(reversed(chain)))


def wire(plans: ProgramPlans) -> Wiring:
    """Classify a program's results."""
    program, plan = plans.program, plans.forward
    memory = _Memory(plan)
    kinds: Mapping[str, list[int]] = {
        kind: [i for i, result in enumerate(program.results) if result.kind == kind]
        for kind in ("output", "mutation", "saved")
    }
    mutated = {program.results[i].index: i for i in kinds["mutation"]}
    results: list[int] = []
    by_position = dict(
        zip(kinds["output"], _origins(memory, kinds["output"], mutated, results), strict=True)
    )
    made = tuple(results)
    results += mutated.values()
    n_inference = len(results)
    saved = tuple(_origins(memory, kinds["saved"], mutated, results))
    in_order = sorted(by_position, key=lambda i: program.results[i].index)
    differentiable = {_result_of(plan, made, i) for i in program.tangents}
    return Wiring(
        results=tuple(results),
        n_outputs=len(made),
        n_inference=n_inference,
        outputs=tuple(by_position[position] for position in in_order),
        fixed=tuple(k for k in range(len(made)) if k not in differentiable),
        detached=tuple(
            program.results[i].index
            for i, origin in by_position.items()
            if isinstance(origin, FromInput)
            and i not in program.tangents
            and program.bindings[origin.index].differentiable
        ),
        mutations=tuple((binding, len(made) + k) for k, binding in enumerate(mutated)),
        saved=saved,
        clones=_clones(memory, results, mutated),
        tangents=_tangents(plans, made),
        reach=_reach(plans, made),
    )


def _clones(memory: _Memory, results: Sequence[int], mutated: Container[int]) -> frozenset[int]:
    """Results that are views of a mutated binding: they have its old value."""
    origins = enumerate(memory.origin(str(memory.plan.outputs[i])) for i in results)
    return frozenset(k for k, origin in origins if origin and origin.index in mutated)


def _origins(
    memory: _Memory, positions: Sequence[int], mutated: Container[int], results: list[int]
) -> list[Origin]:
    """The origins of the outputs at `positions`. Adds those that the driver must return to
    `results`."""
    plan = memory.plan
    known = {plan.outputs[i]: k for k, i in enumerate(results)}
    origins: list[Origin] = []
    for position in positions:
        value = plan.outputs[position]
        if not isinstance(value, str):
            origins.append(value)
            continue
        origin = memory.origin(value)
        if origin is None or origin.index in mutated:
            if value not in known:
                known[value] = len(results)
                results.append(position)
            origins.append(FromResult(known[value]))
        else:
            origins.append(origin)
    return origins


def _result_of(plan: Plan, results: Sequence[int], position: int) -> int | None:
    """The first result with the same value as the output at `position`."""
    values = [plan.outputs[i] for i in results]
    return values.index(plan.outputs[position]) if plan.outputs[position] in values else None


def _tangents(plans: ProgramPlans, results: Sequence[int]) -> tuple[int | None, ...]:
    """For each tangent its result. None if autograd itself computes that part.

    A value that is returned twice is one result. Autograd sums its gradients first, so the first
    tangent is the sum and the others are zero.
    """
    found: list[int | None] = []
    for position in plans.program.tangents:
        index = _result_of(plans.forward, results, position)
        found.append(None if index in found else index)
    return tuple(found)


def _reach(plans: ProgramPlans, results: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    program = plans.program
    if plans.backward is None:
        return ()
    # Autograd asks for a gradient even for a parameter that nothing uses.
    everything = {i for i, each in enumerate(program.bindings) if each.differentiable}
    found: dict[int, set[int]] = {}
    for position, bindings in zip(program.tangents, program.reach, strict=False):
        index = _result_of(plans.forward, results, position)
        if index is not None:
            found.setdefault(index, set()).update(bindings)
    return tuple((k, tuple(sorted(b))) for k, b in found.items() if not b >= everything)
