"""Our plan in the record: its graphs as data, and each step with the time the profiler gave it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fusewright.bench.record import PlanGraph, PlanStep, Rates, StepTime
from fusewright.bench.trace import Trace, owner_of
from fusewright.emit.bundle import ProgramPlans, leading
from fusewright.plan.steps import Plan, Step, View, inputs_of
from fusewright.report import named_plans

GRAPHS = {"forward": ("inference",), "train": ("forward", "backward")}


class Costed(Protocol):
    """A step that costs something: every kind but View."""

    @property
    def name(self) -> str: ...
    @property
    def operators(self) -> tuple[str, ...]: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def operations(self) -> int: ...


def plan_graphs(modes: Sequence[ProgramPlans]) -> tuple[PlanGraph, ...]:
    """Every graph of every mode, as it runs here."""
    return tuple(
        _graph(each.program.mode, name, plan)
        for each in leading(modes)
        for name, plan in named_plans(each)
    )


def _graph(mode: str, name: str, plan: Plan) -> PlanGraph:
    return PlanGraph(
        mode=mode,
        graph=name,
        inputs=tuple(each.name for each in plan.inputs),
        outputs=tuple(str(each) for each in plan.outputs if each is not None),
        values={value: str(spec) for value, spec in plan.specs},
        steps=tuple(map(_step, plan.steps)),
    )


def _step(step: Step) -> PlanStep:
    return PlanStep(
        name=step.name,
        kind=_kind(step),
        operators=(step.node.op,) if isinstance(step, View) else step.operators,
        reads=inputs_of(step),
        writes=tuple(name for name in step.outputs if name),
        bytes=0 if isinstance(step, View) else step.bytes_moved,
        operations=0 if isinstance(step, View) else step.operations,
        reason=getattr(step, "reason", ""),
    )


def step_times(
    plans: ProgramPlans, pass_name: str, trace: Trace, rates: Rates, precision: str
) -> tuple[StepTime, ...]:
    """Our plan's steps with the times that the profiler gives them."""
    steps = list(_costed(plans, pass_name))
    owners = [_owner(step) for _, step in steps]
    rows: list[StepTime] = []
    for index, (graph, step) in enumerate(steps):
        owner = owners[index]
        count, place = owners.count(owner), owners[:index].count(owner)
        # Some other number of spans than steps: nobody can say whose is whose.
        fits = trace.turns.get(owner, 0) == count * trace.calls
        picked = [w for w in trace.work if fits and w.owner == owner and w.turn % count == place]
        time_us = sum(w.time_us for w in picked) / trace.calls if picked else None
        names = tuple(dict.fromkeys(w.name for w in picked))
        launched = len(picked) / max(trace.calls, 1)
        rows.append(_row(graph, step, names, launched, time_us, roof_us(step, rates, precision)))
    return tuple(rows)


def _costed(plans: ProgramPlans, pass_name: str) -> Iterator[tuple[str, Costed]]:
    for name, plan in named_plans(plans):
        if name in GRAPHS[pass_name]:
            yield from ((name, step) for step in plan.steps if not isinstance(step, View))


def _owner(step: Costed) -> str:
    return owner_of(step.name, step.operators if _kind(step) == "call" else ())


def _kind(step: object) -> str:
    return type(step).__name__.lower()


def roof_us(step: Costed, rates: Rates, precision: str) -> float:
    """How long a step takes at the measured rates of what it runs on."""
    memory = step.bytes_moved / rates.copy_bytes_per_s * 1e6
    # A loop's operations are scalar ones, far below any rate; those of a product are not.
    if _kind(step) == "loop":
        return memory
    rate = rates.products.get(precision, rates.products["fp32"])
    if _kind(step) != "call" and "fp16" in rates.products:
        # Ours run on halves: three products of them for float32's precision.
        rate = rates.products["fp16"] / (3 if precision in ("fp64", "fp32") else 1)
    return max(memory, step.operations / rate * 1e6)


def _row(
    graph: str,
    step: Costed,
    kernels: tuple[str, ...],
    launches: float,
    time_us: float | None,
    roof_us: float,
) -> StepTime:
    return StepTime(
        graph=graph,
        step=step.name,
        kind=_kind(step),
        kernels=kernels,
        launches=launches,
        time_us=time_us,
        bytes=step.bytes_moved,
        operations=step.operations,
        bytes_per_s=step.bytes_moved / time_us * 1e6 if time_us else None,
        operations_per_s=step.operations / time_us * 1e6 if time_us else None,
        roof_us=roof_us,
        roof_share=roof_us / time_us if time_us else None,
    )
