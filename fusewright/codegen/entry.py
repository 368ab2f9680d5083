"""The C entry point of a kernel: it binds arguments, chooses an instantiation and launches it."""

from __future__ import annotations

from collections.abc import Collection

from fusewright.codegen.form import Form, constants
from fusewright.codegen.lanes import indented
from fusewright.codegen.text import size_in_doubles, size_text
from fusewright.ir.graph import ONE, ZERO, Dim, Ratio
from fusewright.ir.loop import Access
from fusewright.ir.operators import STORAGE_TYPES
from fusewright.schedule.index_width import NARROW_LIMIT, extents
from fusewright.schedule.loops import SMALL_TILE
from fusewright.schedule.vector_width import vector_axes, vectors
from fusewright.target.target import Target


def bind(form: Form) -> list[str]:
    """The function that fills the functor's members."""
    kernel = form.kernel
    lines = [f"{kernel.name}_body<I> body;"]
    for argument in kernel.arguments:
        const = "" if argument.is_output else "const "
        name = form.pointers[argument.name]
        lines.append(f"body.{name} = static_cast<{const}{STORAGE_TYPES[argument.dtype]}*>({name});")
    lines += [f"body.{name} = static_cast<I>({name});" for name in form.symbols.values()]
    for item in constants(form):
        if isinstance(item.value, Dim | Ratio):
            number = size_in_doubles(item.value, form.symbols)
            kind = form.register(item.name)
            lines.append(f"body.{form.names[item.name]} = static_cast<{kind}>({number});")
    parameters = ", ".join(_parameters(form))
    return [
        "template <typename I>",
        f"{kernel.name}_body<I> {kernel.name}_bind({parameters}) {{",
        *indented([*lines, "return body;"]),
        "}",
    ]


def _parameters(form: Form) -> list[str]:
    pointers = [f"void* {form.pointers[each.name]}" for each in form.kernel.arguments]
    return pointers + [f"int64_t {name}" for name in form.symbols.values()]


def function(form: Form, target: Target) -> list[str]:
    """The extern "C" function. On the host it is also a built-in function of Python."""
    parameters = [*_parameters(form), "void* workspace", "int where", "void* stream"]
    on_host = target.language == "host"
    return [
        f'extern "C" int {form.kernel.name}({", ".join(parameters)}) {{',
        *indented(_host_calls(form) if on_host else _cuda_calls(form)),
        "}",
        *([f"FW_CALLED({form.kernel.name})"] if on_host else []),
    ]


def bound(form: Form, index: str) -> str:
    """The call that binds the functor to the entry's arguments."""
    arguments = [form.pointers[each.name] for each in form.kernel.arguments]
    arguments += list(form.symbols.values())
    return f"{form.kernel.name}_bind<{index}>({', '.join(arguments)})"


def _host_calls(form: Form) -> list[str]:
    schedule, body = form.schedule, bound(form, "int64_t")
    if schedule.kind == "pointwise":
        return [f"return fw::pointwise({body}, where);"]
    template = f"fw::{schedule.kind}<{schedule.lanes}>"
    if form.scans:
        return [f"return {template}({body}, where);"]
    return [f"return {template}({body}, {schedule.splits}, workspace, where);"]


def _cuda_calls(form: Form) -> list[str]:
    """At most three instantiations: vectors with 32-bit indices, vectors with 64-bit indices, and
    single elements."""
    lanes = form.schedule.lanes
    narrow, vectors = narrow_text(form), vector_text(form) if lanes > 1 else "true"
    lines = []
    if narrow not in ("true", "false"):
        lines.append(f"const bool narrow = {narrow};")
    if vectors != "true":
        lines.append(f"const bool vectors = {vectors};")
    only = {"true": "int", "false": "int64_t"}.get(narrow)
    tests = [] if vectors == "true" else ["vectors"]
    made: list[tuple[list[str], str, int]] = []
    if only is None:
        made.append(([*tests, "narrow"], "int", lanes))
    if only or form.schedule.wide_index or lanes == 1:
        made.append((tests, only or "int64_t", lanes))
    if made[-1][0]:
        made.append(([], only or "int64_t", 1))
    return [*lines, *(_returned(*each, form) for each in made)]


def _returned(tests: list[str], index: str, lanes: int, form: Form) -> str:
    call = f"return {_launch(form, index, lanes)};"
    return f"if ({' && '.join(tests)}) {call}" if tests else call


def _launch(form: Form, index: str, lanes: int) -> str:
    schedule, body = form.schedule, bound(form, index)
    unroll, cached, shared = schedule.unroll, schedule.cached, schedule.shared
    if lanes < schedule.lanes:
        # Single elements are not copied to shared memory: each sweep reads them again. A row in
        # registers must still fit. Otherwise more single elements are loaded at once.
        cached, shared = cached and not shared, 0
        if not form.scans and not (cached and schedule.kind == "column"):
            unroll = unroll * schedule.lanes if cached else max(4, unroll)
    if schedule.kind == "pointwise":
        numbers = f"{lanes}, {schedule.threads}, {unroll}"
        return f"fw::pointwise<{index}, {numbers}>({body}, where, stream)"
    if form.is_tiled:
        # Single elements need more addresses per thread, so their tile is small.
        tile = schedule.tile if lanes == schedule.lanes else SMALL_TILE
        numbers = f"{lanes}, {tile}, {schedule.threads}"
        if schedule.kind == "transpose":
            return f"fw::transpose<{index}, {numbers}>({body}, where, stream)"
    elif schedule.kind == "row":
        beyond = schedule.beyond * schedule.lanes // lanes
        shape = f"{lanes}, {schedule.threads}, {schedule.rows}, {unroll}"
        numbers = f"{shape}, {str(cached).lower()}, {beyond}, {shared}"
    elif schedule.kind == "scan":
        numbers = f"{lanes}, {schedule.threads}, {schedule.rows}, {unroll}"
    else:
        across = schedule.across
        numbers = f"{lanes}, {across}, {schedule.threads // across}, {unroll}"
        if cached:
            return f"fw::held_column<{index}, {numbers}>({body}, where, stream)"
    tail = f"{schedule.splits}, workspace, where, stream"
    driver = schedule.kind if form.transposed_inner is None else "transpose_within"
    return f"fw::{driver}<{index}, {numbers}>({body}, {tail})"


def narrow_text(form: Form) -> str:
    """Whether every index and offset fits into 32 bits: "true", "false" or a test of symbols."""
    tests: dict[str, None] = {}
    for terms in extents(form.kernel):
        fixed = sum(term.factor for term in terms if term.is_static)
        moving = [size_text(term, form.symbols) for term in terms if not term.is_static]
        if fixed >= NARROW_LIMIT:
            return "false"
        if moving:
            tests[f"{' + '.join([*moving, str(fixed)])} < {NARROW_LIMIT}"] = None
    return " && ".join(tests) or "true"


def vector_text(form: Form, new: Collection[str] = ()) -> str:
    """Whether vectors are whole and aligned, as a test of pointers and symbols. `new` buffers are
    allocated by us and therefore aligned."""
    schedule, kernel = form.schedule, form.kernel
    alone = schedule.kind == "pointwise" and len(kernel.outer) == 1
    axes = vector_axes(kernel, schedule.kind)
    steps = [] if alone else [kernel.axes[axis].size for axis in axes]
    tests: dict[str, None] = {}
    for access, axis in vectors(kernel, schedule.kind):
        if access.strides[axis] != ONE:
            continue
        steps += [stride for at, stride in enumerate(access.strides) if at != axis]
        if access.offset or access.buffer not in new:
            tests[_aligned(form, access)] = None
    for step in steps:
        if step.divided_by(schedule.lanes) is None and step != ZERO:
            tests[f"{size_text(step, form.symbols)} % {schedule.lanes} == 0"] = None
    return " && ".join(tests) or "true"


def _aligned(form: Form, access: Access) -> str:
    storage = next(
        STORAGE_TYPES[each.dtype] for each in form.kernel.arguments if each.name == access.buffer
    )
    offset = " + ".join(size_text(each, form.symbols) for each in access.offset) or "0"
    return (
        f"fw::aligned<{storage}, {form.schedule.lanes}>({form.pointers[access.buffer]}, {offset})"
    )
