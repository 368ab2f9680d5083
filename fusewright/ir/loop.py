"""The loop language: what one fused kernel computes, before it is written in C++.

A `LoopKernel` runs over outer axes and inner axes. Inner axes are those that its reductions run
over; a kernel without reductions has none. Every value lives at one of two levels: *element*
values exist at each point of outer × inner, *row* values at each point of outer alone. A
reduction turns an element value into a row value, which element values may read again: that is
how softmax and layer norm are one kernel. `phases` counts how many sweeps over the inner axes
that takes. A scan gives an element the reduction of all elements up to it, along the inner axes in
their order: its result is an element value of the next sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusewright.ir.graph import ONE, Dim, Ratio


@dataclass(frozen=True)
class Axis:
    name: str
    size: Dim


@dataclass(frozen=True)
class Guard:
    """Holds where 0 <= start + Σ step·axis < size: an index that may leave its dimension."""

    steps: tuple[Dim, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Access:
    """Where an element lies: buffer argument, one stride per axis (outer then inner), offset.

    All counted in elements; `offset` is a sum of its terms. There is an element where all `guards`
    hold; only loads have some.
    """

    buffer: str
    strides: tuple[Dim, ...]
    offset: tuple[Dim, ...] = ()
    guards: tuple[Guard, ...] = ()

    @property
    def moves(self) -> tuple[tuple[Dim, ...], ...]:
        """All that tells one axis from another: the strides, and the steps of each guard."""
        return (self.strides, *(guard.steps for guard in self.guards))

    def moved(self, moves: tuple[tuple[Dim, ...], ...]) -> Access:
        """The same with other strides and steps."""
        pairs = zip(self.guards, moves[1:], strict=True)
        guards = tuple(replace(guard, steps=steps) for guard, steps in pairs)
        return replace(self, strides=moves[0], guards=guards)


@dataclass(frozen=True)
class Load:
    """`outside` is the value where a guard does not hold; nothing is read there."""

    name: str
    dtype: str
    access: Access
    outside: int | float | bool = 0


@dataclass(frozen=True)
class Constant:
    """An immediate; the number is converted to `dtype`."""

    name: str
    dtype: str
    value: int | float | bool | Dim | Ratio


@dataclass(frozen=True)
class Index:
    """start + Σ step·axis as an integer: what arange is inside a kernel.

    With a size, whether that lies in [0, size): a guard as a value.
    """

    name: str
    dtype: str
    steps: tuple[Dim, ...]
    start: tuple[Dim, ...] = ()
    size: int | None = None


@dataclass(frozen=True)
class Apply:
    """A scalar operator of the op table. `dtype` is the result's; operands know their own."""

    name: str
    dtype: str
    op: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Reduce:
    """A reduction over all inner axes: sum, prod, max, min, any, all, logsumexp or welford.

    welford has two results, the mean under `name` and the sum of squared deviations (m2) under
    `second`; the others leave `second` empty.
    """

    name: str
    dtype: str
    kind: str
    operand: str
    second: str = ""


@dataclass(frozen=True)
class Scan:
    """A running sum or prod over the inner axes in their order, or `backward` from their end."""

    name: str
    dtype: str
    kind: str
    operand: str
    backward: bool = False


@dataclass(frozen=True)
class Store:
    """Writes `value` (at its own level) to memory, rounded to `dtype`."""

    value: str
    dtype: str
    access: Access


Instruction = Load | Constant | Index | Apply | Reduce | Scan | Store


@dataclass(frozen=True)
class Argument:
    """A buffer the kernel is given; `numel` is how many elements may be touched."""

    name: str
    dtype: str
    is_output: bool


@dataclass(frozen=True)
class LoopKernel:
    """`repeated`: another graph computes anew what is stored, and shall find the same bits."""

    name: str
    summary: str
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    arguments: tuple[Argument, ...]
    symbols: tuple[str, ...]
    body: tuple[Instruction, ...]
    repeated: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.outer + self.inner

    def extent(self, axes: tuple[Axis, ...]) -> Dim:
        total = ONE
        for axis in axes:
            total = total * axis.size
        return total

    @property
    def outer_numel(self) -> Dim:
        return self.extent(self.outer)

    @property
    def inner_numel(self) -> Dim:
        return self.extent(self.inner)


@dataclass(frozen=True)
class Leveled:
    """An analysis of a kernel's body: which values are per element, and in which phase.

    phase[v] for an element value is the first sweep in which it can be computed; for a row value
    it is the number of sweeps that must have finished before it is known (0: before any).
    """

    is_element: Mapping[str, bool]
    phase: Mapping[str, int]
    phases: int


def reads(item: Instruction) -> tuple[str, ...]:
    """The values of the kernel that an instruction takes."""
    match item:
        case Apply():
            return item.operands
        case Reduce() | Scan():
            return (item.operand,)
        case Store():
            return (item.value,)
    return ()


def scans(kernel: LoopKernel) -> tuple[Scan, ...]:
    return tuple(item for item in kernel.body if isinstance(item, Scan))


def touches(access: Access, axes_from: int) -> bool:
    """Whether the element changes along any axis from position `axes_from` on."""
    return any(stride.factor != 0 for strides in access.moves for stride in strides[axes_from:])


def level(kernel: LoopKernel) -> Leveled:
    """Find each value's level and phase."""
    n_outer = len(kernel.outer)
    element: dict[str, bool] = {}
    phase: dict[str, int] = {}
    last = 0
    for item in kernel.body:
        match item:
            case Load():
                element[item.name] = touches(item.access, n_outer)
                phase[item.name] = 0
            case Index():
                element[item.name] = any(step.factor for step in item.steps[n_outer:])
                phase[item.name] = 0
            case Constant():
                element[item.name], phase[item.name] = False, 0
            case Apply():
                element[item.name] = any(element[name] for name in item.operands)
                phase[item.name] = max((phase[name] for name in item.operands), default=0)
            case Reduce():
                for name in (item.name, item.second):
                    element[name] = False
                    phase[name] = phase[item.operand] + 1
                last = max(last, phase[item.name])
            case Scan():
                element[item.name], phase[item.name] = True, phase[item.operand] + 1
            case Store():
                last = max(last, phase[item.value] + (1 if element[item.value] else 0))
    return Leveled(element, phase, max(last, 1))
