"""`Form`: a coalesced kernel with its schedule, its sweeps and its C++ names.

All printers of this package take a `Form`. `form` checks the body, so that they need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusewright.codegen.text import identifier, scaled_text, size_text, sum_text, unique_names
from fusewright.errors import CodegenError
from fusewright.ir.graph import LOOP_DTYPES, ONE, ZERO, Dim
from fusewright.ir.kernel import Kernel
from fusewright.ir.loop import (
    Access,
    Apply,
    Argument,
    Axis,
    Constant,
    Index,
    Load,
    LoopKernel,
    Reduce,
    Scan,
    Store,
    reads,
    scans,
)
from fusewright.ir.operators import REDUCTIONS, REGISTER_TYPES, SCALAR_OPS, SCANS
from fusewright.schedule.choice import Schedule
from fusewright.schedule.coalesce import coalesce, with_long_lanes
from fusewright.schedule.half_precision import half_precision_values
from fusewright.schedule.loops import kept_sweeps, legal
from fusewright.schedule.sweeps import Sweeps, sweeps
from fusewright.schedule.transpose_tiles import TILED, staged, transposed_axis
from fusewright.schedule.vector_width import ROWS
from fusewright.target.target import Target


@dataclass(frozen=True)
class Form:
    """`names` maps values, `pointers` arguments and `symbols` symbols to C++ identifiers.

    `kept` maps values that are kept between sweeps to the sweep that computes them. `given` is the
    load that a matmul or convolution provides from its registers. `positions` are the outer indices
    of a convolution's epilogue in terms of image, y and x, if each of them fits into 32 bits.
    """

    kernel: LoopKernel
    schedule: Schedule
    plan: Sweeps
    names: Mapping[str, str]
    pointers: Mapping[str, str]
    symbols: Mapping[str, str]
    dtypes: Mapping[str, str]
    language: str
    kept: Mapping[str, int]
    given: str = ""
    positions: tuple[str, ...] = ()

    @property
    def is_row(self) -> bool:
        return self.schedule.kind in ROWS

    @property
    def has_factors(self) -> bool:
        """Whether this is an epilogue that goes down columns. Values that depend on the row alone
        are then computed separately."""
        return bool(self.given) and not self.is_row

    @property
    def is_flat(self) -> bool:
        """Whether the kernel has neither reductions nor scans."""
        return self.schedule.kind in ("pointwise", "transpose")

    @property
    def is_tiled(self) -> bool:
        return self.schedule.kind in TILED

    @property
    def transposed(self) -> int | None:
        """The index of the axis that square tiles exchange with the last one, or None without."""
        square = self.is_tiled and self.schedule.kind != "transpose_column"
        return transposed_axis(self.kernel) if square else None

    @property
    def transposed_inner(self) -> int | None:
        """The transposed axis's index among the inner axes, or None if it is an outer one."""
        transposed = self.transposed
        return (
            transposed - self.n_outer
            if transposed is not None and transposed >= self.n_outer
            else None
        )

    @cached_property
    def tiles(self) -> Mapping[Load | Store, int]:
        """The accesses that go through shared memory, with the number of their tile."""
        found = staged(self.kernel, self.schedule.kind)
        numbers: dict[Load | Store, int] = {}
        for kind in (Load, Store):
            numbers |= {x: at for at, x in enumerate(x for x in found if isinstance(x, kind))}
        return numbers

    @cached_property
    def half_precision(self) -> frozenset[str]:
        """Values whose last digits do not matter, because they are stored in 16 bits. Only GPU rows
        use them: memory bounds other loops. A value that is recomputed must keep its bits."""
        wanted = self.language == "cuda" and self.schedule.kind == "row"
        return (
            half_precision_values(self.kernel)
            if wanted and not self.kernel.repeated
            else frozenset()
        )

    @cached_property
    def factors(self) -> tuple[Load | Index | Apply, ...]:
        """The values of an epilogue that depend on its row alone, in the body's order."""
        if not self.has_factors:
            return ()
        found = self.fixed_along(slice(self.n_outer))
        return tuple(item for item in found if item.name in self.plan.needed[0])

    def fixed_along(self, axes: slice) -> tuple[Load | Index | Apply, ...]:
        """The values that are constant along these axes, in the body's order."""
        found: list[Load | Index | Apply] = []
        known = {item.name for item in constants(self)}
        for item in self.kernel.body:
            match item:
                case Load() if item.name != self.given:
                    fixed = all(step == ZERO for each in item.access.moves for step in each[axes])
                case Index():
                    fixed = all(step == ZERO for step in item.steps[axes])
                case Apply():
                    fixed = known.issuperset(item.operands)
                case _:
                    continue
            if fixed:
                found.append(item)
                known.add(item.name)
        return tuple(found)

    @cached_property
    def scans(self) -> tuple[Scan, ...]:
        return scans(self.kernel)

    @property
    def n_outer(self) -> int:
        return len(self.kernel.outer)

    @cached_property
    def row_values(self) -> tuple[str, ...]:
        """The row values that another function reads than the one that computes them."""
        level, fixed = self.plan.level, {item.name for item in constants(self)}
        wanted: set[str] = set()
        for item in self.kernel.body:
            own = isinstance(item, Apply) and not level.is_element[item.name]
            at = level.phase[item.name] if isinstance(item, Apply) and own else None
            wanted.update(name for name in reads(item) if level.phase[name] != at or not own)
        rows = (name for name in self.dtypes if not level.is_element[name] and name not in fixed)
        return tuple(name for name in rows if name in wanted)

    def register(self, value: str) -> str:
        return REGISTER_TYPES[self.dtypes[value]]

    def size(self, size: Dim) -> str:
        return size_text(size, self.symbols)


def form(kernel: LoopKernel, schedule: Schedule, target: Target) -> Form:
    """Check the kernel and its schedule, coalesce it and name its parts."""
    identifier(kernel.name)
    dtypes = value_dtypes(kernel)
    if not legal(kernel, schedule, target):
        raise CodegenError(f"kernel {kernel.name}: schedule {schedule} is not legal for it")
    small = coalesce(kernel)
    if target.language == "host" and schedule.kind == "pointwise":
        small = with_long_lanes(small)
    _check_inner_stores(small)
    symbols, pointers = entry_names(kernel)
    plan, kept = kept_sweeps(small, schedule, target)
    return Form(
        small,
        schedule,
        plan,
        unique_names(dtypes, (*symbols.values(), *pointers.values())),
        pointers,
        symbols,
        dtypes,
        target.language,
        kept,
    )


def entry_names(of: Kernel) -> tuple[dict[str, str], dict[str, str]]:
    """The C++ names of an entry's sizes, and of the pointers to its arguments."""
    symbols = unique_names(of.symbols)
    pointers = unique_names((f"{each.name}_ptr" for each in of.arguments), symbols.values())
    return symbols, {each.name: pointers[f"{each.name}_ptr"] for each in of.arguments}


def part_form(
    whole: Kernel,
    part: LoopKernel,
    arguments: Iterable[Argument],
    schedule: Schedule,
    given: str = "",
    positions: tuple[str, ...] = (),
    taken: Sequence[str] = (),
) -> Form:
    """The form of a loop that is part of a matmul or convolution. It uses the names of the whole
    kernel's entry, and accesses these arguments. No value may have one of the names `taken`."""
    dtypes = value_dtypes(part)
    part = replace(part, arguments=tuple(arguments))
    symbols, pointers = entry_names(whole)
    return Form(
        part,
        schedule,
        sweeps(part),
        unique_names(dtypes, (*symbols.values(), *pointers.values(), *taken)),
        pointers,
        symbols,
        dtypes,
        "cuda",
        {},
        given,
        positions,
    )


def value_dtypes(kernel: LoopKernel) -> dict[str, str]:
    """Every value's dtype. Raises CodegenError if the body breaks a rule of the loop IR."""
    buffers = {each.name: each.dtype for each in kernel.arguments}
    dtypes: dict[str, str] = {}
    for item in kernel.body:
        if isinstance(item, Load | Store):
            _check_access(kernel, item, buffers)
        for name in reads(item):
            if name not in dtypes:
                raise CodegenError(f"kernel {kernel.name}: {name!r} is read before it is defined")
        if isinstance(item, Store):
            continue
        if item.dtype not in LOOP_DTYPES:
            raise CodegenError(
                f"kernel {kernel.name}: {item.name!r} has dtype {item.dtype}, "
                "which loops do not support"
            )
        if isinstance(item, Apply):
            _check_apply(kernel, item, dtypes)
        if isinstance(item, Scan) and (
            item.kind not in SCANS
            or REGISTER_TYPES[item.dtype] != REGISTER_TYPES[dtypes[item.operand]]
        ):
            raise CodegenError(
                f"kernel {kernel.name}: scan {item.kind!r} of {item.operand!r} is not supported"
            )
        dtypes[item.name] = item.dtype
        if isinstance(item, Reduce):
            _check_reduce(kernel, item)
            if item.second:
                dtypes[item.second] = item.dtype
    return dtypes


def _check_access(kernel: LoopKernel, item: Load | Store, buffers: Mapping[str, str]) -> None:
    access = item.access
    if buffers.get(access.buffer) != item.dtype:
        raise CodegenError(
            f"kernel {kernel.name}: buffer {access.buffer!r} has dtype "
            f"{buffers.get(access.buffer)}, its access has {item.dtype}"
        )
    if len(access.strides) != len(kernel.axes):
        raise CodegenError(f"kernel {kernel.name}: {access.buffer!r} needs a stride for each axis")
    for guard in access.guards:
        forward = all(step.is_static and step.factor >= 0 for step in guard.steps)
        fits = isinstance(item, Load) and len(guard.steps) == len(kernel.axes) and forward
        if not fits:
            raise CodegenError(
                f"kernel {kernel.name}: guard {guard} of {access.buffer!r} is not supported"
            )
    if isinstance(item, Store):
        fixed = [
            axis.name
            for axis, stride in zip(kernel.outer, access.strides, strict=False)
            if stride == ZERO and axis.size not in (ONE, ZERO)
        ]
        if fixed:
            raise CodegenError(
                f"kernel {kernel.name}: the store to {access.buffer!r} does not move along {fixed}"
            )


def _check_inner_stores(kernel: LoopKernel) -> None:
    """Every element must be stored to its own address. Otherwise stores would race."""
    plan = sweeps(kernel)
    for item in plan.inner_stores:
        moves = zip(kernel.inner, item.access.strides[len(kernel.outer) :], strict=True)
        fixed = [axis.name for axis, stride in moves if stride == ZERO and axis.size != ONE]
        if plan.level.is_element[item.value] and fixed:
            raise CodegenError(
                f"kernel {kernel.name}: the store to {item.access.buffer!r} does not move "
                f"along {fixed}"
            )


def _check_apply(kernel: LoopKernel, item: Apply, dtypes: Mapping[str, str]) -> None:
    op = SCALAR_OPS.get(item.op)
    if op is None or len(item.operands) != op.arity:
        raise CodegenError(
            f"kernel {kernel.name}: operator {item.op} with {len(item.operands)} operands "
            "does not exist"
        )
    equal = item.operands[1:] if item.op == "where" else item.operands
    kinds = {REGISTER_TYPES[dtypes[name]] for name in equal}
    result = REGISTER_TYPES[item.dtype]
    expected = {result} if item.op != "cast" and op.result == "same" else kinds
    other = op.result != "same" and result != REGISTER_TYPES[op.result]
    if len(kinds) != 1 or kinds != expected or other:
        raise CodegenError(
            f"kernel {kernel.name}: {item.name} = {item.op} has operands of {sorted(kinds)} "
            f"and a result of {result}"
        )


def _check_reduce(kernel: LoopKernel, item: Reduce) -> None:
    if item.kind not in REDUCTIONS:
        raise CodegenError(f"kernel {kernel.name}: reduction {item.kind!r} does not exist")
    floating = item.dtype.startswith(("float", "bfloat"))
    if item.kind == "welford" and not (floating and item.second):
        raise CodegenError(f"kernel {kernel.name}: welford needs a float dtype and two results")
    if item.kind == "logsumexp" and not floating:
        raise CodegenError(f"kernel {kernel.name}: logsumexp needs a float dtype")


def all_coordinates(form: Form, row_prefix: str = "") -> list[str]:
    """i0, i1, … for the outer axes (fields of Row with a prefix), then j0, j1, … for the inner."""
    outer = [f"{row_prefix}i{at}" for at in range(form.n_outer)]
    if row_prefix and form.positions:
        outer = [f"I({name})" for name in outer]
    return outer + [f"j{at}" for at in range(len(form.kernel.inner))]


def offset_text(form: Form, access: Access, at: list[str]) -> str:
    """The element offset of an access as an expression of the coordinates."""
    return linear_text(form, access.strides, access.offset, at)


def linear_text(form: Form, steps: tuple[Dim, ...], start: tuple[Dim, ...], at: list[str]) -> str:
    """start + Σ step·coordinate."""
    moves = [
        scaled_text(step, f"({name})" if "+" in name else name, form.symbols)
        for step, name in zip(steps, at, strict=True)
    ]
    return sum_text([*moves, *(form.size(each) for each in start)])


def index_text(form: Form, item: Index, at: list[str]) -> str:
    return linear_text(form, item.steps, item.start, at)


def decompose(
    form: Form,
    axes: tuple[Axis, ...],
    letter: str,
    lane: str = "",
    transposed: int | None = None,
    index: str = "q",
) -> list[str]:
    """Statements that compute the coordinates of axes. The last axis's is `lane`, if given, the
    transposed axis's is m, and the others are the digits of `index`."""
    last = len(axes) - 1
    fixed = {last: lane} if lane and axes else {}
    fixed |= {transposed: "m"} if transposed is not None else {}
    lines = [f"const I {letter}{at} = {name};" for at, name in fixed.items()]
    rest = [at for at in range(len(axes)) if at not in fixed]
    divisor = ONE
    for at in reversed(rest):
        quotient = index if divisor == ONE else _divided(form, "over", index, divisor)
        value = quotient if at == rest[0] else _divided(form, "rest", quotient, axes[at].size)
        lines.append(f"const I {letter}{at} = {value};")
        divisor = divisor * axes[at].size
    return lines


def _divided(form: Form, name: str, index: str, by: Dim) -> str:
    """A quotient or remainder. Epilogues have 64-bit indices, so they call a function that divides
    in 32 bits if it can. Powers of two do not need it."""
    size = form.size(by)
    if form.given and not (by.is_static and by.factor & (by.factor - 1) == 0):
        return f"fw::{name}({index}, {size})"
    return f"{index} {'/' if name == 'over' else '%'} ({size})"


def constants(form: Form) -> list[Constant]:
    return [item for item in form.kernel.body if isinstance(item, Constant)]
