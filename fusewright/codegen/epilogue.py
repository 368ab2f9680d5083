"""What products and windows share in C++: the functor of their epilogue, and their entry.

The functor is that of a loop with one sweep, by columns, or by rows where it reduces them. What
belongs to a column alone, such as a bias, is then computed once for all rows of a tile. The product
itself is given lane by lane (`give`) before `visit`. A window that stores elements and reduces them
over positions has a functor for each (`apart`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from fusewright.codegen.body import functor
from fusewright.codegen.entry import bind, bound, narrow_text, vector_text
from fusewright.codegen.form import Form, part_form, value_dtypes
from fusewright.codegen.lanes import indented
from fusewright.codegen.split_epilogue import PLANE, reduced, stored
from fusewright.codegen.text import comment, identifier
from fusewright.errors import CodegenError
from fusewright.ir.convolution import WindowKernel
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import ONE, ZERO, Dim
from fusewright.ir.loop import Load, LoopKernel, Reduce, Store
from fusewright.ir.matmul import ProductKernel
from fusewright.schedule.choice import Schedule
from fusewright.schedule.coalesce import merge, restrided
from fusewright.schedule.vector_width import lanes_fit

Ended = ProductKernel | WindowKernel

VECTORS = (4, 2)  # columns: of a product the first, of a window the first that fits
PAIR = 2  # positions that a window reduces at once, as threads hold its sums


def ending_forms(kernel: Ended) -> tuple[Form, ...]:
    """The epilogue as the printers take it, with the columns as its outer or inner axes. What a
    window stores for each element comes before what it reduces over positions."""
    identifier(kernel.name)
    value_dtypes(kernel.epilogue)
    parts = _parts(kernel)
    widths = VECTORS if isinstance(kernel, WindowKernel) else VECTORS[:1]
    for lanes in (*widths, 1):
        schedules = tuple(_schedule(kernel, part, lanes) for part in parts)
        if lanes == 1 or _all_fit(kernel, parts, schedules):
            break
    return tuple(_form(kernel, *each) for each in zip(parts, schedules, strict=True))


def _parts(kernel: Ended) -> tuple[LoopKernel, ...]:
    """The loops that the elements go through."""
    epilogue = kernel.epilogue
    if isinstance(kernel, ProductKernel):
        return (_merged(epilogue if epilogue.inner else _by_columns(kernel)),)
    if not epilogue.inner:
        return (_by_columns(kernel),)
    if kernel.reduces is not Reduces.ACROSS:
        return (epilogue,)
    stores, reduces = stored(epilogue, kernel.product), reduced(epilogue, kernel.product)
    if stores is None:
        return (reduces,)
    stores = merge(_by_columns(replace(kernel, epilogue=stores)))
    return replace(stores, name=f"{epilogue.name}_stores"), reduces


def _merged(part: LoopKernel) -> LoopKernel:
    """Over as few axes as a product's rows and columns need: each further one is a division for
    every element (H200, 65536 rows of 768 by 256, seen as a batch of one: 834 µs)."""
    small = merge(part)
    return small if small.outer and small.inner and ZERO not in _sizes(part) else part


def _sizes(part: LoopKernel) -> list[Dim]:
    return [axis.size for axis in part.axes]


def _form(kernel: Ended, part: LoopKernel, schedule: Schedule) -> Form:
    used = {
        item.access.buffer
        for item in part.body
        if isinstance(item, Store) or (isinstance(item, Load) and item.name != kernel.product)
    }
    arguments = (each for each in part.arguments if each.name in used)
    name = kernel.name + part.name.removeprefix(kernel.epilogue.name)
    positions = _positions(kernel, part)
    part = replace(part, name=name)
    return part_form(kernel, part, arguments, schedule, kernel.product, positions)


def _positions(kernel: Ended, epilogue: LoopKernel) -> tuple[str, ...]:
    """A pointwise window's outer indices of image, y and x: they need no divisions, and 32 bits."""
    if not isinstance(kernel, WindowKernel) or _has_reduction(epilogue):
        return ()
    of = kernel.geometry
    z, y, x = (Dim(axis.result) for axis in of.axes)
    height = of.y.result  # y counts the rows of all z
    ways = {
        (of.images, z, y, x): ("image", f"y / {height}", f"y % {height}", "x"),
        (of.images, z, y * x): ("image", f"y / {height}", f"y % {height} * {of.x.result} + x"),
        (of.images, z * y, x): ("image", "y", "x"),
        (of.images, Dim(of.pixels)): ("image", f"y * {of.x.result} + x"),
    }
    if of.rows == 1:
        ways[of.images, x] = ("image", "x")
    return ways.get(tuple(axis.size for axis in epilogue.outer), ())


def _by_columns(kernel: Ended) -> LoopKernel:
    """A pointwise epilogue as a sweep down the columns."""
    whole, across = kernel.epilogue, kernel.column_axes
    down = [axis for axis in range(len(whole.outer)) if axis not in across]
    counted = math.prod((whole.outer[axis].size for axis in down), start=ONE)
    if not across or counted != kernel.all_rows:
        raise CodegenError(f"kernel {kernel.name}: the epilogue does not run over the result")
    outer, inner = (tuple(whole.outer[axis] for axis in axes) for axes in (across, down))
    body = restrided(whole.body, lambda strides: tuple(strides[at] for at in (*across, *down)))
    return replace(whole, outer=outer, inner=inner, body=body)


def _schedule(kernel: Ended, part: LoopKernel, lanes: int) -> Schedule:
    """Lanes are the columns that a thread takes at once, if pointers are aligned; every tile is a
    split of its own."""
    by_row = kernel.reduces is Reduces.ACROSS and _has_reduction(part)
    if by_row and isinstance(kernel, WindowKernel):
        lanes = min(lanes, PAIR)
    return Schedule("row" if by_row else "column", lanes=lanes, splits=2)


def _has_reduction(part: LoopKernel) -> bool:
    return any(isinstance(item, Reduce) for item in part.body)


def _all_fit(kernel: Ended, parts: tuple[LoopKernel, ...], schedules: tuple[Schedule, ...]) -> bool:
    widest = max(each.lanes for each in schedules)
    if isinstance(kernel, WindowKernel) and kernel.geometry.x.result % widest:
        return False
    return all(
        lanes_fit(_in_memory(kernel, part), schedule.kind, schedule.lanes)
        for part, schedule in zip(parts, schedules, strict=True)
    )


def _in_memory(kernel: Ended, epilogue: LoopKernel) -> LoopKernel:
    """A kernel of nothing but the epilogue's accesses that go to memory."""
    accesses = [item for item in epilogue.body if isinstance(item, Load | Store)]
    kept = [
        Load(f"access_{at}", item.dtype, item.access)
        for at, item in enumerate(accesses)
        if not (isinstance(item, Load) and item.name == kernel.product)
    ]
    return replace(epilogue, body=tuple(kept))


def vectors_text(kernel: Ended, forms: Sequence[Form], new: Collection[str] = ()) -> str:
    """Whether vectors are whole and aligned, as a test of pointers and symbols; but for those of
    `new` buffers, which are aligned."""
    if all(form.schedule.lanes == 1 for form in forms):
        return "false"
    tests = [
        vector_text(replace(form, kernel=_in_memory(kernel, form.kernel)), new)
        for form in forms
        if form.schedule.lanes > 1
    ]
    return " && ".join(each for each in dict.fromkeys(tests) if each != "true") or "true"


def ending_lines(
    kernel: Ended,
    forms: Sequence[Form],
    title: str,
    body: list[str],
    parts: str = "workspace",
    before: Sequence[str] = (),
) -> list[str]:
    """The functors, their binding and the extern "C" function with this body, which finds `end`,
    what the elements end in, and `vectors`, whether several columns may go together. `parts` is
    where reductions leave theirs, `before` what else the body needs."""
    end = f"const auto end = {_end_text(kernel, forms, parts)};"
    vectors = f"const bool vectors = {vectors_text(kernel, forms)};"
    head = [f"// {kernel.name}: {comment(kernel.summary)}", f"// {comment(title)}"]
    parameters = [f"void* {forms[0].pointers[each.name]}" for each in kernel.arguments]
    parameters += [f"int64_t {name}" for name in forms[0].symbols.values()]
    parameters += ["void* workspace", "int where", "void* stream"]
    return [
        "namespace {",
        *head,
        *before,
        *(line for form in forms for line in (*functor(form), *bind(form))),
        "}  // namespace",
        f'extern "C" int {kernel.name}({", ".join(parameters)}) {{',
        *indented([vectors, end, *body]),
        "}",
    ]


def _end_text(kernel: Ended, forms: Sequence[Form], parts: str) -> str:
    """What the elements end in: the functors, bound to the entry's arguments."""
    if not isinstance(kernel, WindowKernel) or kernel.reduces is not Reduces.ACROSS:
        (form,) = forms
        return _bound_text(form, "ByRow" if form.is_row else "ByColumn", "", parts)
    *stores, reduces = forms
    first = "fw::Nothing{}"
    if stores:
        first = _bound_text(stores[0], "ByColumn", "", "nullptr")
    planes = reduces.kernel.inner[-1].name == PLANE
    numbers = f", {_flag(kernel.per_image)}, {kernel.together}, {_flag(planes)}"
    return f"fw::StoredAndReduced{{{first}, {_bound_text(reduces, 'ByChannel', numbers, parts)}}}"


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _bound_text(form: Form, kind: str, numbers: str, parts: str) -> str:
    index = "int" if narrow_text(form) == "true" else "int64_t"
    body = f"{form.kernel.name}_body<{index}>"
    return f"fw::{kind}<{body}{numbers}>{{{{{bound(form, index)}, {parts}}}}}"


def pointer_text(form: Form, kind: str, name: str) -> str:
    return f"static_cast<const {kind}*>({form.pointers[name]})"
