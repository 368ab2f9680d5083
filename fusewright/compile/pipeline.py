"""The way of the data, end to end: a model and an example call → plans and one kernel source.

Each stage is dumped as it is left (see `debug`). Nothing here decides anything; kernels that
several graphs share are written once.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusewright.capture import capture
from fusewright.codegen.source import Source
from fusewright.cost.break_even import least_size
from fusewright.debug import dump
from fusewright.emit.bundle import ProgramPlans, leading
from fusewright.errors import CaptureError, FusewrightError
from fusewright.ir.convolution import WindowKernel
from fusewright.ir.graph import Graph, Program, pretty
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import ProductKernel
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.plan import plan
from fusewright.plan.equal_kernels import Kernel, canonical
from fusewright.plan.show import show
from fusewright.plan.steps import Fused, Loop, Plan, Window, WindowGradient
from fusewright.rewrite import rewrite
from fusewright.rewrite.convolutions import with_windows
from fusewright.rewrite.layouts import with_channels_last
from fusewright.rewrite.matmuls import with_products
from fusewright.runtime import tensor_cores
from fusewright.target.device import architecture
from fusewright.target.target import TRIALS, Target
from fusewright.tune.candidates import Choice
from fusewright.tune.search import OnProgress, Sized, chosen, settled, source_of, tune
from fusewright.tune.store import Tuned

MODES = ("train", "eval")


@dataclass(frozen=True)
class Prepared:
    """All that is known of a model before anything is compiled.

    A mode that has matrix products of ours comes twice: first with them, for GPUs that have the
    tensor cores, then without. `tuned` are the kernels for which schedules were measured, now or
    earlier. `left_out` are modes that could not be captured, each with the reason.
    """

    target: Target
    source: Source
    modes: tuple[ProgramPlans, ...]
    seconds: Mapping[str, float]
    tuned: tuple[Tuned, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


def target_of(device: torch.device) -> Target:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        hopper = architecture(device) == "sm_90a"
        shared_bytes = facts.shared_memory_per_multiprocessor
        tf32, rounded = tensor_cores._fw_terms() == 1, tensor_cores._fw_window_terms() == 1
        sms = facts.multi_processor_count
        return Target.cuda(sms, hopper, _trials(), shared_bytes, tf32, rounded)
    return Target.host()


def _trials() -> tuple[str, ...]:
    """What the user wants to try before it is on for all: FUSEWRIGHT_TRY=sweeping,halves."""
    wanted = tuple(filter(None, os.environ.get("FUSEWRIGHT_TRY", "").split(",")))
    unknown = [each for each in wanted if each not in TRIALS]
    if unknown:
        raise FusewrightError(f"FUSEWRIGHT_TRY={','.join(unknown)!r}: it takes {','.join(TRIALS)}")
    return wanted


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
    """Capture, rewrite, plan, schedule and render; for `device` unless a target is given.

    Schedules are those that tuning found on this device, then the heuristic's; `tuning` has them
    measured now. Nothing is known of a target that is given.
    """
    seconds: dict[str, float] = {}
    here, target = target is None, target or target_of(device)
    programs, left_out = _timed(seconds, "capture", lambda: _captured(model, args, kwargs, modes))
    planned = [
        each
        for program in programs
        for each in _timed(seconds, "plan", lambda p=program: _planned(p, target))
    ]
    shared = _Shared()
    planned = [shared.plans(each) for each in planned]
    sized: list[Sized] = [
        *shared.loops.values(),
        *shared.products.values(),
        *shared.windows.values(),
        *shared.gradients.values(),
    ]
    tuned: Mapping[str, Tuned] = {}
    if here:
        run = _run_here(planned)
        mine = [each for each in sized if each[0].name in run]
        tuned = _timed(seconds, "tune", lambda: _tuned(mine, target, device, tuning))
    kernels = [
        (kernel, chosen(kernel, sizes, target, tuned.get(kernel.name))) for kernel, sizes in sized
    ]
    source = _timed(seconds, "render", lambda: source_of(kernels, target))
    _dump(planned, kernels, source)
    return Prepared(target, source, tuple(planned), seconds, tuple(tuned.values()), left_out)


def _captured(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, modes: Sequence[str]
) -> tuple[list[Program], tuple[tuple[str, str], ...]]:
    """The modes' programs, and why others have none: one that is asked for alone must have one."""
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
        warnings.warn(words, RuntimeWarning, stacklevel=7)  # whoever called optimize
    return programs, left_out


def _run_here(planned: Sequence[ProgramPlans]) -> frozenset[str]:
    """The kernels that run on the device at hand: others need no measuring."""
    plans = [p for each in leading(planned) for p in (each.forward, each.inference, each.backward)]
    return frozenset(step.kernel.name for plan in plans if plan for step in plan.kernels)


def _tuned(
    kernels: Sequence[Sized], target: Target, device: torch.device, tuning: OnProgress | None
) -> Mapping[str, Tuned]:
    if tuning is None:
        return settled(kernels, target, device)
    return tune(kernels, target, device, tuning)


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

    def on_cores(graph: Graph, trains: bool = False) -> Graph:
        graph = with_products(graph, sizes, target.halves, target.tf32)
        return with_windows(graph, sizes, trains)

    ours = _plans(
        replace(
            program,
            forward=on_cores(program.forward, program.backward is not None),
            inference=on_cores(program.inference),
            backward=on_cores(program.backward) if program.backward else None,
        ),
        target,
    )
    return [_for_large_batches(ours, target), plain] if ours.has_products else [plain]


def _for_large_batches(plans: ProgramPlans, target: Target) -> ProgramPlans:
    """Small batches are better off with PyTorch's products: the plain program is there for them."""
    program = plans.program
    if len(program.symbols) != 1:
        return plans
    (symbol,) = program.symbols
    held = [p for p in (plans.inference, plans.backward) if p is not None]
    steps = [step for each in held for step in each.on_cores]
    kernels = [step.kernel for step in steps if not isinstance(step, WindowGradient)]
    least = least_size(kernels, symbol.name, program.example_sizes, target.sms, target.tf32)
    guards = (*program.guards, f"{symbol.name} >= {least}")
    return replace(plans, program=replace(program, guards=guards))


def _plans(program: Program, target: Target) -> ProgramPlans:
    """Of the program with PyTorch's convolutions in the layout that suits them."""
    if target.turning:
        program = with_channels_last(program)
    sizes = program.example_sizes
    backward = program.backward.nodes if program.backward else ()
    repeated = frozenset(node.name for node in backward)
    shared = repeated.intersection(node.name for node in program.forward.nodes)
    none = frozenset[str]()

    def planned(graph: Graph, repeated: frozenset[str], shared: frozenset[str]) -> Plan:
        how = (target.turning, target.sweeping, repeated, target.online, shared, target.computing)
        return plan(graph, sizes, *how)

    return ProgramPlans(
        program=program,
        forward=planned(program.forward, repeated, shared),
        inference=planned(program.inference, none, none),
        backward=planned(program.backward, none, shared) if program.backward else None,
    )


class _Shared:
    """Gives every kernel one name in the module, and equal kernels the same one."""

    def __init__(self) -> None:
        self.loops: dict[str, tuple[LoopKernel, Mapping[str, int]]] = {}
        self.products: dict[str, tuple[ProductKernel, Mapping[str, int]]] = {}
        self.windows: dict[str, tuple[WindowKernel, Mapping[str, int]]] = {}
        self.gradients: dict[str, tuple[GradientKernel, Mapping[str, int]]] = {}
        self._by_content: dict[Kernel, str] = {}

    def plans(self, plans: ProgramPlans) -> ProgramPlans:
        sizes = plans.program.example_sizes
        return replace(
            plans,
            forward=self._plan(plans.forward, sizes),
            inference=self._plan(plans.inference, sizes),
            backward=self._plan(plans.backward, sizes) if plans.backward else None,
        )

    def _plan(self, plan: Plan, sizes: Mapping[str, int]) -> Plan:
        steps = tuple(
            self._step(step, sizes) if isinstance(step, Fused) else step for step in plan.steps
        )
        return replace(plan, steps=steps)

    def _step(self, step: Fused, sizes: Mapping[str, int]) -> Fused:
        name = self._name(step.name, canonical(step.kernel))
        if isinstance(step, Loop):
            loop = self.loops.setdefault(name, (replace(step.kernel, name=name), sizes))[0]
            return replace(step, name=name, kernel=loop)
        if isinstance(step, Window):
            window = self.windows.setdefault(name, (replace(step.kernel, name=name), sizes))[0]
            return replace(step, name=name, kernel=window)
        if isinstance(step, WindowGradient):
            made = self.gradients.setdefault(name, (replace(step.kernel, name=name), sizes))[0]
            return replace(step, name=name, kernel=made)
        product = self.products.setdefault(name, (replace(step.kernel, name=name), sizes))[0]
        return replace(step, name=name, kernel=product)

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
    planned: Sequence[ProgramPlans],
    kernels: Sequence[tuple[Kernel, Choice]],
    source: Source,
) -> None:
    for each in planned:
        dump(f"{each.name}_plan", show(each))
    dump("schedules", "".join(f"{kernel.name}: {choice}\n" for kernel, choice in kernels))
    dump("kernels", source.text, ".cu" if source.language == "cuda" else ".cpp")
