"""Our plan in the record: its graphs as data, and each step with its time in the profile."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.bench.record import PlanGraph, PlanStep, Rates, StepTime
from fusewright.bench.trace import Trace, Work, owner_of
from fusewright.emit.bundle import ProgramPlans, leading
from fusewright.plan.steps import Call, Fused, Plan, Step, View, inputs_of

GRAPHS = {"forward": ("inference",), "train": ("forward", "backward")}
Costed = Fused | Call  # a step that costs something


def plan_graphs(modes: Sequence[ProgramPlans]) -> tuple[PlanGraph, ...]:
    """Every graph of every mode, as it runs on this device."""
    return tuple(
        _graph(each.program.mode, name, plan)
        for each in leading(modes)
        for name, plan in each.named
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
        kind=step.kind,
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
    """The steps of our plan with their times in the profile."""
    steps = [
        (name, step)
        for name, plan in plans.named
        if name in GRAPHS[pass_name]
        for step in plan.steps
        if not isinstance(step, View)
    ]
    owners = [
        owner_of(step.name, step.operators if step.kind == "call" else ()) for _, step in steps
    ]
    rows: list[StepTime] = []
    for index, (graph, step) in enumerate(steps):
        owner = owners[index]
        count, turn = owners.count(owner), owners[:index].count(owner)
        # Spans and steps can be matched only if there are equally many.
        fits = trace.turns.get(owner, 0) == count * trace.calls
        picked = [w for w in trace.work if fits and w.owner == owner and w.turn % count == turn]
        rows.append(_row(graph, step, picked, trace.calls, roof_us(step, rates, precision)))
    return tuple(rows)


def roof_us(step: Costed, rates: Rates, precision: str) -> float:
    """How long a step takes at the measured rates of the units that it runs on."""
    memory = step.bytes_moved / rates.copy_bytes_per_s * 1e6
    # Scalar operations take far less time than the memory; those of tensor cores and calls may not.
    if isinstance(step, Fused) and not step.kernel.on_tensor_cores:
        return memory
    rate = rates.products.get(precision, rates.products["fp32"])
    if isinstance(step, Fused) and "fp16" in rates.products:
        # Our kernels multiply in fp16: three matmuls for float32's precision.
        rate = rates.products["fp16"] / (3 if precision in ("fp64", "fp32") else 1)
    return max(memory, step.operations / rate * 1e6)


def _row(graph: str, step: Costed, work: Sequence[Work], calls: int, roof_us: float) -> StepTime:
    time_us = sum(each.time_us for each in work) / calls if work else None
    return StepTime(
        graph=graph,
        step=step.name,
        kind=step.kind,
        kernels=tuple(dict.fromkeys(each.name for each in work)),
        launches=len(work) / max(calls, 1),
        time_us=time_us,
        bytes=step.bytes_moved,
        operations=step.operations,
        bytes_per_s=step.bytes_moved / time_us * 1e6 if time_us else None,
        operations_per_s=step.operations / time_us * 1e6 if time_us else None,
        roof_us=roof_us,
        roof_share=roof_us / time_us if time_us else None,
    )
