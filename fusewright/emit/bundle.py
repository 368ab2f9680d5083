"""The input of emission: programs with their plans, and a description of the example call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusewright.codegen.source import Source
from fusewright.ir.graph import Program
from fusewright.plan.steps import Call, Plan

Constant = int | float | complex | bool | str | None | tuple["Constant", ...]


@dataclass(frozen=True)
class Owner:
    """A submodule as it was in the example. Guards compare all of its fields with a call's module.

    `kind` is its class. Kernels contain `values`, its constants. `tensors` are its parameters and
    buffers: table, name, and whether it is set, or the path where the same tensor came first.
    `hooks` are those that were captured with it.
    """

    path: tuple[str, ...]
    kind: str
    values: tuple[tuple[str, Constant], ...]
    children: tuple[str, ...]
    tensors: tuple[tuple[str, str, bool | tuple[str, ...]], ...]
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """The example call: `structure` is `_fw_flatten`'s text of (args, kwargs).

    `plain` is the number of positional arguments if all are tensors and nothing else was given,
    else -1. `parameters` names the positional parameters of the original forward.
    """

    structure: str
    plain: int
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramPlans:
    """One mode. `forward` also returns what `backward` needs; `inference` does not.

    `worth`: a symbol and the size from which on PyTorch's own matmuls are not faster.
    """

    program: Program
    forward: Plan
    inference: Plan
    backward: Plan | None
    owners: tuple[Owner, ...] = ()
    worth: tuple[str, int] | None = None

    @property
    def guards(self) -> tuple[str, ...]:
        """The rules for sizes at which this program runs."""
        least = ["{} >= {}".format(*self.worth)] if self.worth else []
        return (*self.program.guards, *least)

    @property
    def all_plans(self) -> tuple[Plan, ...]:
        plans = (self.inference, self.forward, self.backward)
        return tuple(plan for plan in plans if plan is not None)

    @property
    def driven(self) -> tuple[Plan, ...]:
        """The plans that get a driver. Without a backward plan the forward plan never runs."""
        return (self.inference,) if self.backward is None else self.all_plans

    @property
    def named(self) -> tuple[tuple[str, Plan], ...]:
        """The plans that run, under their names in records."""
        inference = ("inference", self.inference)
        if self.backward is None:
            return (inference,)
        return (("forward", self.forward), inference, ("backward", self.backward))

    @property
    def has_tensor_core_steps(self) -> bool:
        """Whether it needs the tensor cores for which our matmuls are written."""
        return any(plan.on_tensor_cores for plan in self.all_plans)

    @property
    def has_layers(self) -> bool:
        """Whether it calls a recurrent layer, which PyTorch's autograd records."""
        steps = [step for plan in self.all_plans for step in plan.steps]
        return any(isinstance(step, Call) and bool(step.node.layer) for step in steps)

    @property
    def name(self) -> str:
        """The mode. A suffix distinguishes it from the same mode at other calls."""
        return self.program.mode + self.program.variant


@dataclass(frozen=True)
class ModuleBundle:
    """One model on one type of device: the input of its `ModelNew` text.

    `autocast` is autocast's dtype in the example, empty if it was off. `default_dtype` was the
    dtype of new tensors. `absent` are attributes that forward asked for and did not find: the path
    of a submodule, and a name.
    """

    name: str
    language: str
    source: Source
    arguments: Arguments
    modes: tuple[ProgramPlans, ...]
    autocast: str = ""
    default_dtype: str = "float32"
    absent: tuple[tuple[tuple[str, ...], str], ...] = ()

    @property
    def device_type(self) -> str:
        return "cuda" if self.language == "cuda" else "cpu"

    @property
    def has_tensor_core_steps(self) -> bool:
        return any(each.has_tensor_core_steps for each in self.modes)

    @property
    def has_layers(self) -> bool:
        return any(each.has_layers for each in self.modes)


def for_all_sizes(bundle: ModuleBundle) -> ModuleBundle:
    """The bundle without the rules `worth`: a file cannot make other programs. Calls with an empty
    batch stay excluded."""
    modes = (replace(e, worth=(e.worth[0], 1)) if e.worth else e for e in bundle.modes)
    return replace(bundle, modes=tuple(modes))


def leading(modes: Sequence[ProgramPlans]) -> tuple[ProgramPlans, ...]:
    """The first program of each mode: the one that runs on the device it was planned for."""
    first: dict[str, ProgramPlans] = {}
    for each in modes:
        first.setdefault(each.program.mode, each)
    return tuple(first.values())


def without_gradients(modes: Sequence[ProgramPlans]) -> tuple[str, ...]:
    """Which modes have no gradients of ours, and why; the same reason is said once."""
    reasons: dict[str, list[str]] = {}
    for each in leading(modes):
        if each.program.forward_only:
            reasons.setdefault(each.program.forward_only, []).append(each.program.mode)
    return tuple(
        f"in {' and '.join(found)} mode, calls with gradients run the original forward: {reason}"
        for reason, found in reasons.items()
    )
