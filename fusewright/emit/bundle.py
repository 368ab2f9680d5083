"""What is written out: programs with their plans, and what the example call looked like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.codegen.source import Source
from fusewright.ir.graph import Program
from fusewright.plan.steps import Call, Plan

Constant = int | float | complex | bool | str | None | tuple["Constant", ...]


@dataclass(frozen=True)
class Owner:
    """A submodule as it was in the example.

    Constants of the model are written into kernels, so they are part of the guard; so are its
    class, its children by name, its parameters and buffers (`tensors`: table, name, and whether
    there is one, or the place where the same one was met before), and those hooks that were
    captured with it.
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

    `plain` is the number of positional arguments when all are tensors and nothing else was given,
    else -1. `parameters` names the positional parameters of the original forward.
    """

    structure: str
    plain: int
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramPlans:
    """One mode: `forward` leaves what `backward` needs, `inference` leaves nothing."""

    program: Program
    forward: Plan
    inference: Plan
    backward: Plan | None
    owners: tuple[Owner, ...] = ()

    @property
    def has_products(self) -> bool:
        """Whether it runs only where the tensor cores are that our products are written for."""
        plans = (self.forward, self.inference, self.backward)
        return any(plan is not None and bool(plan.on_cores) for plan in plans)

    @property
    def has_layers(self) -> bool:
        """Whether a recurrent layer is called, which PyTorch's autograd records."""
        plans = (self.forward, self.inference, self.backward)
        steps = [step for plan in plans if plan is not None for step in plan.steps]
        return any(isinstance(step, Call) and bool(step.node.layer) for step in steps)

    @property
    def name(self) -> str:
        """The mode, told apart from the same mode without products."""
        return self.program.mode + ("_products" if self.has_products else "")


@dataclass(frozen=True)
class ModuleBundle:
    """One model on one kind of device: all that the text of its `ModelNew` is made from.

    `autocast` is the dtype that autocast converted to in the example, empty where it was off;
    `default_dtype` is what new tensors were.
    """

    name: str
    language: str
    source: Source
    arguments: Arguments
    modes: tuple[ProgramPlans, ...]
    autocast: str = ""
    default_dtype: str = "float32"

    @property
    def device_type(self) -> str:
        return "cuda" if self.language == "cuda" else "cpu"

    @property
    def has_products(self) -> bool:
        return any(each.has_products for each in self.modes)

    @property
    def has_layers(self) -> bool:
        return any(each.has_layers for each in self.modes)


def leading(modes: Sequence[ProgramPlans]) -> tuple[ProgramPlans, ...]:
    """The first program of each mode: the one that runs on the device it was planned for."""
    first: dict[str, ProgramPlans] = {}
    for each in modes:
        first.setdefault(each.program.mode, each)
    return tuple(first.values())
