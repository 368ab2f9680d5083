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
from fusewright.plan.same import canonical, canonical_product
from fusewright.plan.show import show
from fusewright.plan.steps import Fused, Loop, Plan
from fusewright.product import ProductKernel
from fusewright.rewrite import rewrite
from fusewright.rewrite.products import with_products
from fusewright.schedule import ProductSchedule, Schedule, Target, choose, choose_product

MODES = ("train", "eval")


@dataclass(frozen=True)
class Prepared:
    """All that is known of a model before anything is compiled.

    A mode that has matrix products of ours comes twice: first with them, for GPUs that have the
    tensor cores, then without.
    """

    target: Target
    source: Source
    modes: tuple[ProgramPlans, ...]
    seconds: Mapping[str, float]


def target_of(device: torch.device) -> Target:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return Target.cuda(facts.multi_processor_count, (facts.major, facts.minor) == (9, 0))
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
    planned = [
        each
        for program in programs
        for each in _timed(seconds, "plan", lambda p=program: _planned(p, target))
    ]
    shared = _Shared()
    planned = [shared.plans(each) for each in planned]
    kernels = [(kernel, choose(kernel, target, sizes)) for kernel, sizes in shared.loops.values()]
    products = [(each, choose_product(each, target, s)) for each, s in shared.products.values()]
    source = _timed(seconds, "render", lambda: render(kernels, target, products))
    _dump(planned, [*kernels, *products], source)
    return Prepared(target, source, tuple(planned), seconds)


def _timed(seconds: dict[str, float], name: str, run: Any) -> Any:
    start = time.perf_counter()
    result = run()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    return result


def _planned(program: Program, target: Target) -> list[ProgramPlans]:
    dump(f"{program.mode}_captured", _pretty(program))
    program = rewrite(program)
    dump(f"{program.mode}_rewritten", _pretty(program))
    plain = _plans(program)
    if not target.tensor_cores:
        return [plain]
    sizes = program.example_sizes
    ours = _plans(
        replace(
            program,
            forward=with_products(program.forward, sizes),
            inference=with_products(program.inference, sizes),
            backward=with_products(program.backward, sizes) if program.backward else None,
        )
    )
    return [ours, plain] if ours.has_products else [plain]


def _plans(program: Program) -> ProgramPlans:
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
        self.loops: dict[str, tuple[LoopKernel, Mapping[str, int]]] = {}
        self.products: dict[str, tuple[ProductKernel, Mapping[str, int]]] = {}
        self._by_content: dict[LoopKernel | ProductKernel, str] = {}

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
        if isinstance(step, Loop):
            name = self._name(step.name, canonical(step.kernel))
            loop = self.loops.setdefault(name, (replace(step.kernel, name=name), sizes))[0]
            return replace(step, name=name, kernel=loop)
        name = self._name(step.name, canonical_product(step.kernel))
        product = self.products.setdefault(name, (replace(step.kernel, name=name), sizes))[0]
        return replace(step, name=name, kernel=product)

    def _name(self, wanted: str, content: LoopKernel | ProductKernel) -> str:
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
    kernels: Sequence[tuple[LoopKernel | ProductKernel, Schedule | ProductSchedule]],
    source: Source,
) -> None:
    for each in planned:
        dump(f"{each.name}_plan", show(each))
    dump("schedules", "".join(f"{kernel.name}: {choice}\n" for kernel, choice in kernels))
    dump("kernels", source.text, ".cu" if source.language == "cuda" else ".cpp")
