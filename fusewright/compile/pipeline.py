"""The pipeline: a model and an example call → plans and one kernel source.

Each stage's result is dumped (see `debug`). Kernels that several graphs share are written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fusewright.capture import captures, in_mode
from fusewright.capture.agreement import agreed
from fusewright.capture.hooks import unhooked
from fusewright.capture.mode_reads import watched_mode
from fusewright.capture.witness import Witness, witness
from fusewright.codegen.source import Source
from fusewright.compile.mistakes import reported
from fusewright.compile.planning import plan_programs
from fusewright.compile.stages import (
    SHARE_CAPTURED,
    SHARE_PLANNED,
    SHARE_SCHEDULED,
    Stages,
    collecting_rarely,
)
from fusewright.debug import dump
from fusewright.emit.bundle import ProgramPlans, leading
from fusewright.errors import CaptureError, LeftToEagerError, UnguardedError
from fusewright.ir.graph import Program, Sizes
from fusewright.ir.kernel import Kernel
from fusewright.kinds.kind import Choice
from fusewright.kinds.registry import place_of, render
from fusewright.plan.show import show
from fusewright.plan.steps import Fused, Plan, Step
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
    could not be captured, each with the reason; in those that are `eager` only the original
    forward is right. `witnessed`: each program was compared with a real call.
    """

    target: Target
    source: Source
    modes: tuple[ProgramPlans, ...]
    seconds: Mapping[str, float]
    tuned: tuple[Tuned, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    eager: frozenset[str] = frozenset()
    witnessed: bool = False


def prepare(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    modes: Sequence[str] = MODES,
    device: torch.device,
    target: Target | None = None,
    tuning: OnProgress | None = None,
    changed: Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Prepared:
    """Capture, rewrite, plan, schedule and render, for `device` unless a target is given.

    Schedules come from earlier tuning on this device, else from the heuristic. With `tuning` they
    are measured now. For a given target only the heuristic is used. `changed` are attributes that
    calls of the model are known to change. `progress` is called at the start of each stage with its
    name and the share of the work that is done; tuning is not part of that work.
    """
    stages = Stages(progress)
    with collecting_rarely():
        witnessed = target is None  # a plan for another machine may be for a large example
        found = _captured(model, args, kwargs, modes, changed, stages, witnessed)
    made = prepare_programs(found.programs, stages, device=device, target=target, tuning=tuning)
    left_out = tuple((mode, str(error)) for mode, error in found.failed.items())
    eager = [mode for mode, error in found.failed.items() if isinstance(error, LeftToEagerError)]
    seen = not found.unseen
    return replace(made, left_out=left_out, eager=frozenset(eager), witnessed=seen)


def prepare_programs(
    programs: Sequence[Program],
    stages: Stages,
    *,
    device: torch.device,
    target: Target | None = None,
    tuning: OnProgress | None = None,
    at_any_size: bool = False,
) -> Prepared:
    """Rewrite, plan, schedule and render programs, as `prepare` does."""
    here, target = target is None, target or target_of(device)
    with collecting_rarely(), reported("planning"):
        plans = plan_programs(programs, target, stages, at_any_size=at_any_size)
        planned, sized = shared_kernels(plans)
    tuned: Mapping[str, Tuned] = {}
    if here:
        run = _run_here(planned)
        mine = [each for each in sized if each[0].name in run]
        measured = partial(tune, progress=tuning) if tuning is not None else settled
        with stages.timed("tune"):
            tuned = measured(mine, target, device)
    schedule = stages.running("schedule", "choose schedules", SHARE_PLANNED)
    with schedule, reported("choosing schedules"):
        known = ((each, sizes, tuned.get(each.name)) for each, sizes in sized)
        kernels = [(each, chosen(each, sizes, target, found)) for each, sizes, found in known]
    written = stages.running("render", "write kernels", SHARE_SCHEDULED)
    with written, reported("writing kernels"):
        source = render(kernels, target)
    _dump(planned, kernels, source)
    return Prepared(target, source, planned, stages.seconds, tuple(tuned.values()))


@dataclass
class _Captures:
    """The programs of the modes, the errors of those without one, and modes without a witness."""

    programs: list[Program] = field(default_factory=list)
    failed: dict[str, CaptureError] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)


def _captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    modes: Sequence[str],
    changed: Sequence[str],
    stages: Stages,
    witnessed: bool,
) -> _Captures:
    """The programs of the modes. If all fail, an error.

    A forward that does not ask for the mode is captured once. If `witnessed`, each program is
    compared with a real call.
    """
    made = _Captures()
    alike: tuple[Program, ...] = ()  # of a mode that forward did not ask for
    for at, mode in enumerate(modes):
        if alike:
            made.programs += [replace(each, mode=mode) for each in alike]
            continue
        known = [*changed, *(path for each in made.programs for path in each.changed)]
        with stages.running("capture", f"capture {mode} mode", SHARE_CAPTURED * at / len(modes)):
            try:
                with watched_mode(model) as reads:
                    seen = _seen(model, args, kwargs, mode) if witnessed else None
                    found = captures(model, args, kwargs, mode=mode, changed=known)
                made.unseen += [] if seen else [mode]
                found = agreed(found, seen) if seen else found
            except UnguardedError:
                raise
            except CaptureError as error:
                made.failed[mode] = error
                continue
        made.programs += found
        alike = () if reads.seen or any(each.changed for each in found) else found
    if made.failed and not made.programs:
        first = next(iter(made.failed.values()))
        made.failed.clear()
        try:
            raise first
        finally:
            del first  # else the error would hold this frame, and the frame the error
    return made


def _seen(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, mode: str
) -> Witness | None:
    """A real call in this mode."""
    with in_mode(model, mode), unhooked(model):
        return witness(model, args, kwargs or {})


def _run_here(planned: Sequence[ProgramPlans]) -> frozenset[str]:
    """The kernels that run on this device. Others are not measured."""
    plans = [plan for each in leading(planned) for plan in each.all_plans]
    return frozenset(step.kernel.name for plan in plans for step in plan.kernels)


def shared_kernels(
    found: Sequence[ProgramPlans],
) -> tuple[tuple[ProgramPlans, ...], list[Sized]]:
    """The plans with one name for equal kernels, and these kernels."""
    shared = _Shared()
    planned = tuple(shared.plans(each) for each in found)
    return planned, shared.kernels


class _Shared:
    """Gives each kernel its own name in the module. Equal kernels share a name."""

    def __init__(self) -> None:
        self._sized: dict[str, Sized] = {}
        self._by_content: dict[Kernel, str] = {}
        self._counts: dict[str, int] = {}  # how many kernels wanted the same name

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
        found = self._by_content.get(content)
        if found is None:
            count = self._counts.get(wanted, 0) + 1
            found = wanted if count == 1 else f"{wanted}_{count}"
            while found in self._sized:
                count += 1
                found = f"{wanted}_{count}"
            self._counts[wanted] = count
            self._by_content[content] = found
        return found


def _dump(
    planned: Sequence[ProgramPlans], kernels: Sequence[tuple[Kernel, Choice]], source: Source
) -> None:
    for each in planned:
        dump(f"{each.name}_plan", partial(show, each))
    dump("schedules", lambda: "".join(f"{kernel.name}: {choice}\n" for kernel, choice in kernels))
    dump("kernels", source.text, ".cu" if source.language == "cuda" else ".cpp")
