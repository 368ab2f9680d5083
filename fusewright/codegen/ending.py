"""What products and windows share in C++: the functor of their epilogue, and their entry.

The functor is that of a loop with one sweep, by columns, or by rows where it reduces them. What
belongs to a column alone, such as a bias, is then computed once for all rows of a tile. The product
itself is given lane by lane (`give`) before `visit`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusewright.coalesce import restrided
from fusewright.codegen.body import functor
from fusewright.codegen.entry import bind, bound, narrow_text, vector_text
from fusewright.codegen.form import Form, value_dtypes
from fusewright.codegen.lanes import indented
from fusewright.codegen.text import comment, identifier, unique_names
from fusewright.ending import Reduces
from fusewright.errors import CodegenError
from fusewright.ir import ONE, Dim
from fusewright.loop import Load, LoopKernel, Store
from fusewright.product import ProductKernel
from fusewright.schedule import Schedule, lanes_fit
from fusewright.sweep import sweeps
from fusewright.window import WindowKernel

Ended = ProductKernel | WindowKernel

VECTORS = (4, 2)  # columns: of a product the first, of a window the first that fits


def ending_form(kernel: Ended) -> Form:
    """The epilogue as the printers take it, with the columns as its outer or inner axes."""
    identifier(kernel.name)
    dtypes = value_dtypes(kernel.epilogue)
    whole = kernel.epilogue if kernel.epilogue.inner else _by_columns(kernel)
    read = {
        item.access.buffer
        for item in kernel.epilogue.body
        if isinstance(item, Load) and item.name != kernel.product
    }
    arguments = tuple(
        each for each in kernel.epilogue.arguments if each.is_output or each.name in read
    )
    symbols = unique_names(kernel.symbols)
    pointers = unique_names((f"{each.name}_ptr" for each in kernel.arguments), symbols.values())
    epilogue = replace(whole, name=kernel.name, arguments=arguments)
    return Form(
        epilogue,
        _schedule(kernel, epilogue),
        sweeps(epilogue),
        unique_names(dtypes, (*symbols.values(), *pointers.values())),
        {each.name: pointers[f"{each.name}_ptr"] for each in kernel.arguments},
        symbols,
        dtypes,
        "cuda",
        {},
        kernel.product,
        _positions(kernel, epilogue),
    )


def _positions(kernel: Ended, epilogue: LoopKernel) -> tuple[str, ...]:
    """A pointwise window's outer indices of image, y and x: they need no divisions, and 32 bits."""
    if not isinstance(kernel, WindowKernel) or kernel.reduces is not Reduces.NOTHING:
        return ()
    of = kernel.geometry
    known = {"image": of.images, "y": Dim(of.y.result), "x": Dim(of.x.result)}
    ways = {
        tuple(known.values()): tuple(known),
        (of.images, known["y"] * known["x"]): ("image", f"y * {of.x.result} + x"),
    }
    if of.y.result == 1:
        ways[of.images, known["x"]] = ("image", "x")
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


def _schedule(kernel: Ended, epilogue: LoopKernel) -> Schedule:
    """Lanes are the columns that a thread takes at once, if pointers are aligned; every tile is a
    split of its own."""
    kind = "row" if kernel.reduces is Reduces.ACROSS else "column"
    if isinstance(kernel, WindowKernel) and kernel.reduces is not Reduces.NOTHING:
        return Schedule(kind, splits=2)
    widths = VECTORS if isinstance(kernel, WindowKernel) else VECTORS[:1]
    in_memory = _in_memory(kernel, epilogue)
    lanes = next((each for each in widths if _lanes_fit(kernel, in_memory, kind, each)), 1)
    return Schedule(kind, lanes=lanes, splits=2)


def _lanes_fit(kernel: Ended, in_memory: LoopKernel, kind: str, lanes: int) -> bool:
    if isinstance(kernel, WindowKernel) and kernel.geometry.x.result % lanes:
        return False
    return lanes_fit(in_memory, kind, lanes)


def _in_memory(kernel: Ended, epilogue: LoopKernel) -> LoopKernel:
    """A kernel of nothing but the epilogue's accesses that go to memory."""
    accesses = [item for item in epilogue.body if isinstance(item, Load | Store)]
    kept = [
        Load(f"access_{at}", item.dtype, item.access)
        for at, item in enumerate(accesses)
        if not (isinstance(item, Load) and item.name == kernel.product)
    ]
    return replace(epilogue, body=tuple(kept))


def vectors_text(kernel: Ended, form: Form) -> str:
    """Whether vectors are whole and aligned, as a test of pointers and symbols."""
    if form.schedule.lanes == 1:
        return "false"
    return vector_text(replace(form, kernel=_in_memory(kernel, form.kernel)))


def ending_lines(
    kernel: Ended, form: Form, title: str, body: list[str], parts: str = "workspace"
) -> list[str]:
    """The functor, its binding and the extern "C" function with this body, which finds `end`, what
    the elements end in, and `vectors`, whether several columns may go together. `parts` is where
    reductions leave theirs."""
    end = f"const auto end = {_end_text(kernel, form, parts)};"
    vectors = f"const bool vectors = {vectors_text(kernel, form)};"
    head = [f"// {kernel.name}: {comment(kernel.summary)}", f"// {comment(title)}"]
    parameters = [f"void* {form.pointers[each.name]}" for each in kernel.arguments]
    parameters += [f"int64_t {name}" for name in form.symbols.values()]
    parameters += ["void* workspace", "int where", "void* stream"]
    return [
        "namespace {",
        *head,
        *functor(form),
        *bind(form),
        "}  // namespace",
        f'extern "C" int {kernel.name}({", ".join(parameters)}) {{',
        *indented([vectors, end, *body]),
        "}",
    ]


def _end_text(kernel: Ended, form: Form, parts: str) -> str:
    """What the elements end in: the functor, bound to the entry's arguments."""
    index = "int" if narrow_text(form) == "true" else "int64_t"
    body, held = f"{form.kernel.name}_body<{index}>", f"{{{{{bound(form, index)}, {parts}}}}}"
    if isinstance(kernel, WindowKernel) and form.is_row:
        apart = str(kernel.per_image).lower()
        return f"fw::ByChannel<{body}, {apart}, {kernel.together}>{{{held}}}"
    if form.is_row:
        return f"fw::ByRow<{body}>{held}"
    return f"fw::ByColumn<{body}>{held}"


def pointer_text(form: Form, kind: str, name: str) -> str:
    return f"static_cast<const {kind}*>({form.pointers[name]})"
