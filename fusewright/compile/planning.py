"""From captured programs to their plans. Equal graphs are planned once.

Training and evaluation often have graphs in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fusewright.compile.stages import SHARE_CAPTURED, SHARE_PLANNED, Stages
from fusewright.cost.break_even import least_size
from fusewright.debug import dump
from fusewright.emit.bundle import ProgramPlans
from fusewright.ir.graph import Graph, Program, pretty
from fusewright.kinds.registry import kind_of
from fusewright.plan import plan
from fusewright.plan.inference import with_kernels_of
from fusewright.plan.steps import Plan
from fusewright.rewrite import rewrite
from fusewright.rewrite.convolutions import with_convolutions
from fusewright.rewrite.layouts import with_channels_last
from fusewright.rewrite.matmuls import MATMUL, with_matmuls
from fusewright.rewrite.row_multiples import with_row_multiples
from fusewright.rewrite.tf32_operands import with_rounded_operands
from fusewright.target.target import Target

PARTS = ("forward", "inference", "backward")


def plan_programs(
    programs: Sequence[Program], target: Target, stages: Stages, *, at_any_size: bool = False
) -> list[ProgramPlans]:
    """The plans of each program, in their order, on tensor cores where that is faster.

    At small sizes PyTorch's matmuls are faster. If the plans must do `at_any_size`, those without
    tensor cores follow.
    """
    planning = _Planning(target, stages, len(programs) * len(PARTS), at_any_size)
    found: list[ProgramPlans] = []
    known: list[tuple[Program, Program, list[ProgramPlans]]] = []
    for program in programs:
        dump(f"{program.mode}_captured", partial(_pretty, program))
        same = next((each for each in known if _alike(each[0], program)), None)
        rewritten = planning.rewritten(program) if same is None else same[1]
        dump(f"{program.mode}_rewritten", partial(_pretty, rewritten))
        plans = planning.shared(rewritten) if same is None else same[2]
        known.append((program, rewritten, plans))
        found += [_in_mode(each, program.mode) for each in plans]
    return found


def _alike(one: Program, other: Program) -> bool:
    """Whether two programs are equal in all but their mode."""
    other = replace(other, mode=one.mode)
    return one is other or (one == other and repr(one) == repr(other))


def _in_mode(plans: ProgramPlans, mode: str) -> ProgramPlans:
    return replace(plans, program=replace(plans.program, mode=mode))


@dataclass(frozen=True)
class _Known:
    """A planned graph, with everything that its plan depends on."""

    graph: Graph
    sizes: dict[str, int]
    repeated: frozenset[str]
    shared: frozenset[str]
    plan: Plan

    def answers(self, asked: tuple[object, ...], graph: Graph) -> bool:
        # Equality does not distinguish 1, 1.0 and True, or 0.0 and -0.0; their texts differ.
        if asked != (self.sizes, self.repeated, self.shared):
            return False
        same = self.graph is graph or self.graph == graph
        return same and (self.graph is graph or repr(self.graph) == repr(graph))


class _Planning:
    def __init__(self, target: Target, stages: Stages, graphs: int, at_any_size: bool) -> None:
        self.target = target
        self.at_any_size = at_any_size
        self.stages = stages
        self._graphs = graphs
        self._done = 0
        self._known: list[_Known] = []

    def rewritten(self, program: Program) -> Program:
        with self.stages.timed("rewrite"):
            return rewrite(program)

    def shared(self, program: Program) -> list[ProgramPlans]:
        """The plans, with one kernel for what forward and inference both compute."""
        plans, sizes = self.plans(program), program.example_sizes
        if program.backward is None or not _skips_stores(self.target):
            return plans
        return [
            replace(each, inference=with_kernels_of(each.forward, each.inference, sizes))
            for each in plans
        ]

    def plans(self, program: Program) -> list[ProgramPlans]:
        if not self.target.tensor_cores:
            return [self._plans(program)]
        with self.stages.timed("rewrite"):
            fewer, changed = self._with_matmuls(program)
        if all(getattr(changed, part) == getattr(fewer, part) for part in PARTS):
            return [self._plans(program)]
        ours = self._plans(changed)
        if not ours.has_tensor_core_steps:
            return [self._plans(program)]
        ours = replace(ours, worth=_worth(ours, self.target))
        return [ours, self._plans(program)] if self.at_any_size and ours.worth else [ours]

    def _with_matmuls(self, program: Program) -> tuple[Program, Program]:
        """The program before and after our matmuls and convolutions have taken their place; for
        fewer sizes, if more matmuls are ours then."""
        changed = _on_tensor_cores(program, self.target)
        fewer = program if self.at_any_size else with_row_multiples(program)
        if fewer is program:
            return program, changed
        trial = _on_tensor_cores(fewer, self.target)
        return (fewer, trial) if _matmuls(trial) > _matmuls(changed) else (program, changed)

    def _plans(self, program: Program) -> ProgramPlans:
        """The plans of a program, with PyTorch's convolutions in channels-last if that is
        faster."""
        if self.target.transposing:
            with self.stages.timed("rewrite"):
                program = with_rounded_operands(with_channels_last(program), program)
        nodes = program.backward.nodes if program.backward else ()
        repeated = frozenset(node.name for node in nodes)
        shared = repeated.intersection(node.name for node in program.forward.nodes)
        none = frozenset[str]()

        def planned(part: str, graph: Graph, *names: frozenset[str]) -> Plan:
            words = f"plan {program.mode} mode, {part}"
            share = min(self._done / self._graphs, 1.0) * (SHARE_PLANNED - SHARE_CAPTURED)
            self._done += 1
            with self.stages.running("plan", words, SHARE_CAPTURED + share):
                return self._plan(graph, program.example_sizes, *names)

        forward = planned("forward", program.forward, repeated, shared)
        mine = program.again.intersection(node.name for node in program.inference.nodes)
        later = program.again if program.mode == "forward" else none
        inference = planned("inference", program.inference, later, mine)
        if program.backward is None:
            return ProgramPlans(program, forward, inference, None)
        backward = planned("backward", program.backward, none, shared)
        return ProgramPlans(program, forward, inference, backward)

    def _plan(
        self, graph: Graph, sizes: dict[str, int], repeated: frozenset[str], shared: frozenset[str]
    ) -> Plan:
        asked = (sizes, repeated, shared)
        found = next((each.plan for each in self._known if each.answers(asked, graph)), None)
        if found is None:
            found = plan(graph, sizes, self.target, repeated=repeated, shared=shared)
            self._known.append(_Known(graph, sizes, repeated, shared, found))
        return found


def _skips_stores(target: Target) -> bool:
    """Whether kernels leave out a store at no cost: a GPU's stores have a condition anyway."""
    return target.language == "cuda"


def _on_tensor_cores(program: Program, target: Target) -> Program:
    """The program with our matmuls and convolutions where they are expected to be faster."""
    sizes = program.example_sizes

    def changed(graph: Graph, trains: bool = False) -> Graph:
        graph = with_matmuls(graph, sizes, target)
        return with_convolutions(graph, sizes, target, trains)

    return replace(
        program,
        forward=changed(program.forward, program.backward is not None),
        inference=changed(program.inference),
        backward=changed(program.backward) if program.backward else None,
    )


def _matmuls(program: Program) -> int:
    """How many matmuls are ours."""
    graphs = (program.forward, program.inference, program.backward)
    return sum(node.op == MATMUL for each in graphs if each for node in each.nodes)


def _worth(plans: ProgramPlans, target: Target) -> tuple[str, int] | None:
    """The batch from which on our matmuls are faster than PyTorch's. None if that is unknown."""
    program = plans.program
    if len(program.symbols) != 1:
        return None
    (symbol,) = program.symbols
    held = [p for p in (plans.inference, plans.backward) if p is not None]
    kernels = [step.kernel for each in held for step in each.kernels]
    costs = [partial(cost, each, target) for each in kernels if (cost := kind_of(each).times_us)]
    least = least_size(costs, symbol.name, program.example_sizes)
    return symbol.name, least


def _pretty(program: Program) -> str:
    parts = [("forward", program.forward), ("inference", program.inference)]
    parts += [("backward", program.backward)] if program.backward else []
    return "\n\n".join(f"# {name}\n{pretty(graph)}" for name, graph in parts) + "\n"
