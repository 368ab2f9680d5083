"""The pipeline: a model and an example call → plans and one kernel source.

Each stage's result is dumped (see `debug`). Kernels that several graphs share are written once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fusewright.capture import capture
from fusewright.codegen.source import Source
from fusewright.cost.break_even import least_size
from fusewright.debug import dump
from fusewright.emit.bundle import ProgramPlans, leading
from fusewright.errors import CaptureError
from fusewright.ir.graph import Graph, Program, Sizes, pretty
from fusewright.ir.kernel import Kernel
from fusewright.kinds.kind import Choice
from fusewright.kinds.registry import kind_of, place_of, render
from fusewright.plan import plan
from fusewright.plan.show import show
from fusewright.plan.steps import Fused, Plan, Step
from fusewright.rewrite import rewrite
from fusewright.rewrite.convolutions import with_convolutions
from fusewright.rewrite.layouts import with_channels_last
from fusewright.rewrite.matmuls import with_matmuls
from fusewright.target.device import target_of
from fusewright.target.target import Target
from fusewright.tune.search import OnProgress, Sized, chosen, settled, tune
from fusewright.tune.store import Tuned

MODES = ("train", "eval")


@dataclass(frozen=True)
class Prepared:
    """The result of all stages before compilation.

    A mode with steps on tensor cores comes twice: first with them, then without, for other GPUs.
    `tuned` are the kernels whose schedules were measured, now or earlier. `left_out` are modes that
    could not be captured, each with the reason.
    """

    target: Target
    source: Source
    modes: tuple[ProgramPlans, ...]
    seconds: Mapping[str, float]
    tuned: tuple[Tuned, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


def prepare(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    modes: Sequence[str] = MODES,
    device: torch.device,
    target: Target | None = None,
    tuning: OnProgress | None = None,
) -> Prepared:
    """Capture, rewrite, plan, schedule and render, for `device` unless a target is given.

    Schedules come from earlier tuning on this device, else from the heuristic. With `tuning` they
    are measured now. For a given target only the heuristic is used.
    """
    seconds: dict[str, float] = {}
    here, target = target is None, target or target_of(device)
    programs, left_out = _timed(seconds, "capture", lambda: _captured(model, args, kwargs, modes))
    found = _timed(seconds, "plan", lambda: [_planned(each, target) for each in programs])
    shared = _Shared()
    planned = [shared.plans(each) for plans in found for each in plans]
    sized = shared.kernels
    tuned: Mapping[str, Tuned] = {}
    if here:
        run = _run_here(planned)
        mine = [each for each in sized if each[0].name in run]
        measured = partial(tune, progress=tuning) if tuning is not None else settled
        tuned = _timed(seconds, "tune", lambda: measured(mine, target, device))
    kernels = [(each, chosen(each, sizes, target, tuned.get(each.name))) for each, sizes in sized]
    source = _timed(seconds, "render", lambda: render(kernels, target))
    _dump(planned, kernels, source)
    return Prepared(target, source, tuple(planned), seconds, tuple(tuned.values()), left_out)


def _captured(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, modes: Sequence[str]
) -> tuple[list[Program], tuple[tuple[str, str], ...]]:
    """The programs of the modes, and the reasons of those without one. If all fail, an error."""
    programs: list[Program] = []
    failed: dict[str, CaptureError] = {}
    for mode in modes:
        try:
            programs.append(capture(model, args, kwargs, mode=mode))
        except CaptureError as error:
            failed[mode] = error
    if failed and not programs:
        raise next(iter(failed.values()))
    left_out = tuple((mode, str(error)) for mode, error in failed.items())
    for mode, reason in left_out:
        words = f"in {mode} mode the original forward runs: {reason}"
        warnings.warn(words, RuntimeWarning, stacklevel=7)  # the caller of optimize
    return programs, left_out


def _run_here(planned: Sequence[ProgramPlans]) -> frozenset[str]:
    """The kernels that run on this device. Others are not measured."""
    plans = [plan for each in leading(planned) for plan in each.all_plans]
    return frozenset(step.kernel.name for plan in plans for step in plan.kernels)


def _timed(seconds: dict[str, float], name: str, run: Any) -> Any:
    start = time.perf_counter()
    result = run()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    return result


def _planned(program: Program, target: Target) -> list[ProgramPlans]:
    dump(f"{program.mode}_captured", _pretty(program))
    program = rewrite(program)
    dump(f"{program.mode}_rewritten", _pretty(program))
    plain = _plans(program, target)
    if not target.tensor_cores:
        return [plain]
    sizes = program.example_sizes

    def on_tensor_cores(graph: Graph, trains: bool = False) -> Graph:
        graph = with_matmuls(graph, sizes, target)
        return with_convolutions(graph, sizes, target, trains)

    ours = _plans(
        replace(
            program,
            forward=on_tensor_cores(program.forward, program.backward is not None),
            inference=on_tensor_cores(program.inference),
            backward=on_tensor_cores(program.backward) if program.backward else None,
        ),
        target,
    )
    return [_for_large_batches(ours, target), plain] if ours.has_tensor_core_steps else [plain]


def _for_large_batches(plans: ProgramPlans, target: Target) -> ProgramPlans:
    """The program with a guard on the batch: at small ones PyTorch's matmuls are faster."""
    program = plans.program
    if len(program.symbols) != 1:
        return plans
    (symbol,) = program.symbols
    held = [p for p in (plans.inference, plans.backward) if p is not None]
    kernels = [step.kernel for each in held for step in each.kernels]
    costs = [partial(cost, each, target) for each in kernels if (cost := kind_of(each).times_us)]
    least = least_size(costs, symbol.name, program.example_sizes)
    guards = (*program.guards, f"{symbol.name} >= {least}")
    return replace(plans, program=replace(program, guards=guards))


def _plans(program: Program, target: Target) -> ProgramPlans:
    """The plans of a program, with PyTorch's convolutions in channels-last if that is faster."""
    if target.transposing:
        program = with_channels_last(program)
    sizes, later = program.example_sizes, program.backward.nodes if program.backward else ()
    repeated = frozenset(node.name for node in later)
    shared = repeated.intersection(node.name for node in program.forward.nodes)
    none = frozenset[str]()

    def planned(graph: Graph, repeated: frozenset[str], shared: frozenset[str]) -> Plan:
        return plan(graph, sizes, target, repeated=repeated, shared=shared)

    forward = planned(program.forward, repeated, shared)
    inference = planned(program.inference, none, none)
    backward = planned(program.backward, none, shared) if program.backward else None
    return ProgramPlans(program, forward, inference, backward)


class _Shared:
    """Gives each kernel its own name in the module. Equal kernels share a name."""

    def __init__(self) -> None:
        self._sized: dict[str, Sized] = {}
        self._by_content: dict[Kernel, str] = {}

    @property
    def kernels(self) -> list[Sized]:
        """Each kernel once, with the example's sizes, in the order of a source."""
        return sorted(self._sized.values(), key=lambda each: place_of(each[0]))

    def plans(self, plans: ProgramPlans) -> ProgramPlans:
        sizes = plans.program.example_sizes
        return replace(
            plans,
            forward=self._plan(plans.forward, sizes),
            inference=self._plan(plans.inference, sizes),
            backward=self._plan(plans.backward, sizes) if plans.backward else None,
        )

    def _plan(self, plan: Plan, sizes: Sizes) -> Plan:
        return replace(plan, steps=tuple(self._step(step, sizes) for step in plan.steps))

    def _step(self, step: Step, sizes: Sizes) -> Step:
        if not isinstance(step, Fused):
            return step
        name = self._name(step.name, step.kernel.canonical())
        named = replace(step.kernel, name=name)
        kernel, _ = self._sized.setdefault(name, (named, sizes))
        return replace(step, name=name, kernel=kernel)

    def _name(self, wanted: str, content: Kernel) -> str:
        if content not in self._by_content:
            name, count, taken = wanted, 1, set(self._by_content.values())
            while name in taken:
                count += 1
                name = f"{wanted}_{count}"
            self._by_content[content] = name
        return self._by_content[content]


def _pretty(program: Program) -> str:
    parts = [("forward", program.forward), ("inference", program.inference)]
    parts += [("backward", program.backward)] if program.backward else []
    return "\n\n".join(f"# {name}\n{pretty(graph)}" for name, graph in parts) + "\n"


def _dump(
    planned: Sequence[ProgramPlans], kernels: Sequence[tuple[Kernel, Choice]], source: Source
) -> None:
    for each in planned:
        dump(f"{each.name}_plan", show(each))
    dump("schedules", "".join(f"{kernel.name}: {choice}\n" for kernel, choice in kernels))
    dump("kernels", source.text, ".cu" if source.language == "cuda" else ".cpp")
