"""The common C++ of matmuls and convolutions: the functor of their epilogue, and their entry.

The functor is that of a loop with one sweep. It goes by columns, or by rows if it reduces them.
With columns, a value that depends on the column alone, such as a bias, is computed once for all
rows of a tile. The accumulator is given lane by lane (`give`) before `visit`. A convolution that
both stores elements and reduces them over positions has a functor for each (`split_epilogue`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fusewright.codegen.entry import (
    all_of,
    bound_lines,
    entry_lines,
    narrow_tests,
    vector_tests,
)
from fusewright.codegen.form import Form, part_form, value_dtypes
from fusewright.codegen.lanes import indented
from fusewright.codegen.layout import definition
from fusewright.codegen.text import identifier
from fusewright.errors import CodegenError
from fusewright.ir.epilogue import Reduces, WithEpilogue
from fusewright.ir.graph import ONE
from fusewright.ir.loop import Load, LoopKernel, Reduce, Store
from fusewright.schedule.choice import Schedule
from fusewright.schedule.coalesce import restrided
from fusewright.schedule.vector_width import lanes_fit


def epilogue_forms(
    kernel: WithEpilogue,
    parts: Sequence[LoopKernel],
    widths: Sequence[int],
    row_width: int,
    columns: int = 0,
    positions: Callable[[LoopKernel], tuple[str, ...]] = lambda part: (),
) -> tuple[Form, ...]:
    """The forms of an epilogue's parts. The columns are the outer or the inner axes of each.

    Vectors have the first of these `widths` that fits and divides `columns`. In a part that reduces
    rows they have at most `row_width`. `positions` gives the outer indices of a pointwise part.
    """
    identifier(kernel.name)
    value_dtypes(kernel.epilogue)
    for lanes in (*widths, 1):
        schedules = [_schedule(kernel, part, lanes, row_width) for part in parts]
        if lanes == 1 or _all_fit(kernel, parts, schedules, columns):
            break
    return tuple(
        _form(kernel, part, schedule, () if has_reduction(part) else positions(part))
        for part, schedule in zip(parts, schedules, strict=True)
    )


def _form(
    kernel: WithEpilogue, part: LoopKernel, schedule: Schedule, positions: tuple[str, ...]
) -> Form:
    used = {
        item.access.buffer
        for item in part.body
        if isinstance(item, Store) or (isinstance(item, Load) and item.name != kernel.accumulator)
    }
    arguments = (each for each in part.arguments if each.name in used)
    name = kernel.name + part.name.removeprefix(kernel.epilogue.name)
    part = replace(part, name=name)
    return part_form(kernel, part, arguments, schedule, kernel.accumulator, positions)


def by_columns(kernel: WithEpilogue) -> LoopKernel:
    """A pointwise epilogue as a sweep down the columns."""
    whole, across = kernel.epilogue, kernel.column_axes
    down = [axis for axis in range(len(whole.outer)) if axis not in across]
    counted = math.prod((whole.outer[axis].size for axis in down), start=ONE)
    if not across or counted != kernel.all_rows:
        raise CodegenError(f"kernel {kernel.name}: the epilogue does not run over the result")
    outer, inner = (tuple(whole.outer[axis] for axis in axes) for axes in (across, down))
    body = restrided(whole.body, lambda strides: tuple(strides[at] for at in (*across, *down)))
    return replace(whole, outer=outer, inner=inner, body=body)


def _schedule(kernel: WithEpilogue, part: LoopKernel, lanes: int, row_width: int) -> Schedule:
    """Lanes are the columns that a thread processes at once, if pointers are aligned. Every tile
    counts as a split."""
    if kernel.reduces is Reduces.ACROSS and has_reduction(part):
        return Schedule("row", lanes=min(lanes, row_width), splits=2)
    return Schedule("column", lanes=lanes, splits=2)


def has_reduction(part: LoopKernel) -> bool:
    return any(isinstance(item, Reduce) for item in part.body)


def _all_fit(
    kernel: WithEpilogue, parts: Sequence[LoopKernel], schedules: Sequence[Schedule], columns: int
) -> bool:
    if columns % max(each.lanes for each in schedules):
        return False
    return all(
        lanes_fit(_in_memory(kernel, part), schedule.kind, schedule.lanes)
        for part, schedule in zip(parts, schedules, strict=True)
    )


def _in_memory(kernel: WithEpilogue, epilogue: LoopKernel) -> LoopKernel:
    """A kernel that has only the epilogue's memory accesses."""
    accesses = [item for item in epilogue.body if isinstance(item, Load | Store)]
    kept = [
        Load(f"access_{at}", item.dtype, item.access)
        for at, item in enumerate(accesses)
        if not (isinstance(item, Load) and item.name == kernel.accumulator)
    ]
    return replace(epilogue, body=tuple(kept))


def vectors_tests(
    kernel: WithEpilogue, forms: Sequence[Form], new: Collection[str] = ()
) -> list[str]:
    """Whether vectors are whole and aligned, as tests of pointers and symbols. `new` buffers are
    always aligned."""
    if all(form.schedule.lanes == 1 for form in forms):
        return ["false"]
    tests = [
        test
        for form in forms
        if form.schedule.lanes > 1
        for test in vector_tests(replace(form, kernel=_in_memory(kernel, form.kernel)), new)
    ]
    return list(dict.fromkeys(tests))


def epilogue_lines(
    kernel: WithEpilogue, forms: Sequence[Form], end: Sequence[str], body: Sequence[str]
) -> list[str]:
    """The extern "C" function with this body. The body can use `end`, the epilogue, which the lines
    `end` define, and `vectors`, which says whether vectors are aligned."""
    vectors = all_of("vectors", vectors_tests(kernel, forms) or ["true"])
    lines = indented([*vectors, *end, *body])
    return entry_lines(kernel, forms[0].symbols.values(), lines)


def end_lines(form: Form, parts: str = "workspace") -> list[str]:
    """The epilogue with one functor. `parts` is the memory for partials of reductions."""
    return bound_lines_of(form, "ByRow" if form.is_row else "ByColumn", "end", parts)


def bound_lines_of(form: Form, kind: str, name: str, parts: str, constants: str = "") -> list[str]:
    """The definition of an epilogue by columns, rows or channels."""
    index = "int" if narrow_tests(form) == [] else "int64_t"
    kind_of = f"{name.capitalize()}"
    return [
        *definition(f"using {kind_of}", f"fw::{kind}<{form.kernel.name}_body<{index}>{constants}>"),
        *bound_lines(form, f"{name}_body"),
        f"const {kind_of} {name}{{{{{name}_body, {parts}}}}};",
    ]


def pointer(form: Form, buffer: str) -> str:
    """A pointer to a buffer, which becomes one of the type that is needed."""
    return f"fw::Pointer{{{form.pointers[buffer]}}}"


def pointer_name(form: Form, buffer: str) -> str:
    """The name of a buffer in equations."""
    return form.pointers[buffer].removesuffix("_ptr")
