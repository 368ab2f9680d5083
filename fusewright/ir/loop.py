"""The loop language: what one fused kernel computes, before it is written in C++.

A `LoopKernel` runs over outer axes and inner axes. Reductions run over the inner axes; a kernel
without reductions has none. Every value has one of two levels: *element* values exist at each point
of outer × inner, *row* values at each point of outer alone. A reduction makes a row value of an
element value, and element values may read it again; so softmax and layer norm are one kernel.
`phases` counts the sweeps over the inner axes that this takes. A scan gives each element the
reduction of all elements up to it, along the inner axes in order; its result is an element value of
the next sweep.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fusewright.ir.graph import ITEM_BYTES, ONE, Dim, Ratio
from fusewright.ir.operators import REDUCTIONS, SCALAR_OPS


@dataclass(frozen=True)
class Axis:
    name: str
    size: Dim


@dataclass(frozen=True)
class Guard:
    """Holds where 0 <= start + Σ step·axis < size: the index is inside its dimension."""

    steps: tuple[Dim, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Access:
    """The address of an element: buffer argument, one stride per axis (outer then inner), offset.

    All are counted in elements; `offset` is a sum of its terms. The element exists where all
    `guards` hold; only loads have guards.
    """

    buffer: str
    strides: tuple[Dim, ...]
    offset: tuple[Dim, ...] = ()
    guards: tuple[Guard, ...] = ()

    @property
    def moves(self) -> tuple[tuple[Dim, ...], ...]:
        """Everything that depends on the axis: the strides, and the steps of each guard."""
        return (self.strides, *(guard.steps for guard in self.guards))

    def moved(self, moves: tuple[tuple[Dim, ...], ...]) -> Access:
        """The same access with other strides and steps."""
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

    With a size, whether that is in [0, size): a guard as a value.
    """

    name: str
    dtype: str
    steps: tuple[Dim, ...]
    start: tuple[Dim, ...] = ()
    size: int | None = None


@dataclass(frozen=True)
class Apply:
    """A scalar operator of ir/operators.py. `dtype` is the result's; operands have their own."""

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
    """A running sum or product over the inner axes in order, or `backward` from their end."""

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
    """A buffer that the kernel is given."""

    name: str
    dtype: str
    is_output: bool


@dataclass(frozen=True)
class LoopKernel:
    """`repeated`: another graph computes the stored values again, and must get the same bits."""

    name: str
    summary: str
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    arguments: tuple[Argument, ...]
    symbols: tuple[str, ...]
    body: tuple[Instruction, ...]
    repeated: bool = False
    kind: ClassVar[str] = "loop"
    on_tensor_cores: ClassVar[bool] = False

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

    def canonical(self) -> LoopKernel:
        """The kernel under numbered names, so that equal kernels compare equal."""
        return self.under(numbered(self.arguments))

    def under(self, buffers: Mapping[str, str]) -> LoopKernel:
        """The kernel with these names for its buffers, and numbered names for everything else."""
        values = self.numbered_values
        axes = {axis.name: f"i{number}" for number, axis in enumerate(self.axes)}
        return replace(
            self,
            name="",
            summary="",
            outer=tuple(replace(axis, name=axes[axis.name]) for axis in self.outer),
            inner=tuple(replace(axis, name=axes[axis.name]) for axis in self.inner),
            arguments=tuple(replace(each, name=buffers[each.name]) for each in self.arguments),
            body=tuple(_renamed(item, values, buffers) for item in self.body),
        )

    @property
    def numbered_values(self) -> dict[str, str]:
        """A numbered name for each value, in the order of the body."""
        values: dict[str, str] = {"": ""}
        for item in self.body:
            second = (item.second,) if isinstance(item, Reduce) and item.second else ()
            for name in (*([] if isinstance(item, Store) else [item.name]), *second):
                values.setdefault(name, f"v{len(values)}")
        return values

    def as_repeated(self) -> LoopKernel:
        return replace(self, repeated=True)

    def without(self, outputs: Collection[str]) -> LoopKernel:
        """The kernel without these outputs, and without the values that only they need."""
        kept: list[Instruction] = []
        needed: set[str] = set()
        for item in reversed(self.body):
            if isinstance(item, Store):
                wanted = item.access.buffer not in outputs
            else:
                second = item.second if isinstance(item, Reduce) else ""
                wanted = item.name in needed or (bool(second) and second in needed)
            if wanted:
                kept.append(item)
                needed.update(reads(item))
        rest = tuple(each for each in self.arguments if each.name not in outputs)
        return replace(self, arguments=rest, body=tuple(reversed(kept)))

    def overwrites(self, source: str, target: str) -> bool:
        """Whether each element of `source` is read where `target` is written."""
        read, written = (
            {
                (item.access.strides, item.access.offset)
                for item in self.body
                if isinstance(item, kind) and item.access.buffer == name
            }
            for kind, name in ((Load, source), (Store, target))
        )
        return len(read) == 1 and read == written

    def is_empty(self, sizes: Mapping[str, int]) -> bool:
        return any(axis.size.at(sizes) <= 0 for axis in self.axes)

    def points(self, where: Access, sizes: Mapping[str, int]) -> int:
        """How many elements an access touches."""
        pairs = zip(self.axes, where.strides, strict=True)
        return math.prod(axis.size.at(sizes) for axis, stride in pairs if stride.factor)

    def bytes_moved(self, sizes: Mapping[str, int], held: Mapping[str, int] | None = None) -> int:
        """Each distinct element read once, each stored element written once.

        `held` are the bytes of whole tensors: several accesses, such as a window's taps, read at
        most those. Without it, accesses of one buffer count as reads of the same elements.
        """
        reads: dict[str, dict[Access, int]] = {}
        writes = 0
        for item in self.body:
            if isinstance(item, Load | Store):
                size = self.points(item.access, sizes) * ITEM_BYTES[item.dtype]
                if isinstance(item, Load):
                    reads.setdefault(item.access.buffer, {})[item.access] = size
                else:
                    writes += size
        whole = {name: max(found.values()) for name, found in reads.items()} | dict(held or {})
        return writes + sum(min(whole[name], sum(found.values())) for name, found in reads.items())

    def operations(self, sizes: Mapping[str, int]) -> int:
        """Scalar operations; a value per row counts once per row."""
        leveled = level(self)
        rows, cells = self.outer_numel.at(sizes), self.inner_numel.at(sizes)
        total = 0
        for item in self.body:
            if isinstance(item, Apply):
                cost = SCALAR_OPS[item.op].cost if item.op in SCALAR_OPS else 0
                total += int(cost) * rows * (cells if leveled.is_element[item.name] else 1)
            elif isinstance(item, Reduce):
                total += rows * cells * REDUCTIONS[item.kind].cost
            elif isinstance(item, Scan):
                total += rows * cells
        return total


def numbered(arguments: Iterable[Argument]) -> dict[str, str]:
    """A numbered name for each buffer."""
    return {each.name: f"b{at}" for at, each in enumerate(arguments)}


def _renamed(
    item: Instruction, values: Mapping[str, str], buffers: Mapping[str, str]
) -> Instruction:
    if isinstance(item, Store):
        access = replace(item.access, buffer=buffers[item.access.buffer])
        return replace(item, value=values[item.value], access=access)
    made: Instruction = replace(item, name=values[item.name])
    match made:
        case Apply():
            return replace(made, operands=tuple(values[name] for name in made.operands))
        case Reduce():
            return replace(made, operand=values[made.operand], second=values[made.second])
        case Scan():
            return replace(made, operand=values[made.operand])
        case Load():
            return replace(made, access=replace(made.access, buffer=buffers[made.access.buffer]))
    return made


@dataclass(frozen=True)
class Leveled:
    """An analysis of a kernel's body: which values are per element, and in which phase.

    phase[v] of an element value is the first sweep that can compute it. For a row value it is the
    number of sweeps that must finish before it is known (0: before any).
    """

    is_element: Mapping[str, bool]
    phase: Mapping[str, int]
    phases: int


def reads(item: Instruction) -> tuple[str, ...]:
    """The kernel's values that an instruction reads."""
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
