"""The way of the data, end to end: a model and an example call → plans and one kernel source.

Each stage is dumped as it is left (see `debug`). Nothing here decides anything; kernels that
several graphs share are written once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusewright.capture import capture
from fusewright.codegen.render import render
from fusewright.codegen.source import Source
from fusewright.debug import dump
from fusewright.emit.bundle import ProgramPlans
from fusewright.ir import Graph, Program, pretty
from fusewright.loop import LoopKernel
from fusewright.plan import plan
from fusewright.plan.same import canonical
from fusewright.plan.show import show
from fusewright.plan.steps import Loop, Plan
from fusewright.rewrite import rewrite
from fusewright.schedule import Schedule, Target, choose

MODES = ("train", "eval")


@dataclass(frozen=True)
class Prepared:
    """All that is known of a model before anything is compiled."""

    target: Target
    source: Source
    modes: tuple[ProgramPlans, ...]
    seconds: Mapping[str, float]


def target_of(device: torch.device) -> Target:
    if device.type == "cuda":
        return Target.cuda(torch.cuda.get_device_properties(device).multi_processor_count)
    return Target.host()


def prepare(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    modes: Sequence[str] = MODES,
    device: torch.device,
    target: Target | None = None,
) -> Prepared:
    """Capture, rewrite, plan, schedule and render; for `device` unless a target is given."""
    seconds: dict[str, float] = {}
    target = target or target_of(device)
    programs = [
        _timed(seconds, "capture", lambda m=mode: capture(model, args, kwargs, mode=m))
        for mode in modes
    ]
    planned = [_timed(seconds, "plan", lambda p=program: _planned(p)) for program in programs]
    shared = _Shared()
    planned = [shared.plans(each) for each in planned]
    kernels = [(kernel, choose(kernel, target, sizes)) for kernel, sizes in shared.kernels.values()]
    source = _timed(seconds, "render", lambda: render(kernels, target))
    _dump(planned, kernels, source)
    return Prepared(target, source, tuple(planned), seconds)


def _timed(seconds: dict[str, float], name: str, run: Any) -> Any:
    start = time.perf_counter()
    result = run()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    return result


def _planned(program: Program) -> ProgramPlans:
    dump(f"{program.mode}_captured", _pretty(program))
    program = rewrite(program)
    dump(f"{program.mode}_rewritten", _pretty(program))
    sizes = program.example_sizes

    def planned(graph: Graph) -> Plan:
        return plan(graph, sizes)

    return ProgramPlans(
        program=program,
        forward=planned(program.forward),
        inference=planned(program.inference),
        backward=planned(program.backward) if program.backward else None,
    )


class _Shared:
    """Gives every kernel one name in the module, and equal kernels the same one."""

    def __init__(self) -> None:
        self.kernels: dict[str, tuple[LoopKernel, Mapping[str, int]]] = {}
        self._by_content: dict[LoopKernel, str] = {}

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
            self._loop(step, sizes) if isinstance(step, Loop) else step for step in plan.steps
        )
        return replace(plan, steps=steps)

    def _loop(self, loop: Loop, sizes: Mapping[str, int]) -> Loop:
        key = canonical(loop.kernel)
        if key not in self._by_content:
            name, count = loop.name, 1
            while name in self.kernels:
                count += 1
                name = f"{loop.name}_{count}"
            self._by_content[key] = name
            self.kernels[name] = (replace(loop.kernel, name=name), sizes)
        name = self._by_content[key]
        return replace(loop, name=name, kernel=self.kernels[name][0])


def _pretty(program: Program) -> str:
    parts = [("forward", program.forward), ("inference", program.inference)]
    parts += [("backward", program.backward)] if program.backward else []
    return "\n\n".join(f"# {name}\n{pretty(graph)}" for name, graph in parts) + "\n"


def _dump(
    planned: Sequence[ProgramPlans],
    kernels: Sequence[tuple[LoopKernel, Schedule]],
    source: Source,
) -> None:
    for each in planned:
        dump(f"{each.program.mode}_plan", show(each))
    dump("schedules", "".join(f"{kernel.name}: {choice}\n" for kernel, choice in kernels))
    dump("kernels", source.text, ".cu" if source.language == "cuda" else ".cpp")
