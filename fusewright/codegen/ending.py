"""What products and windows share in C++: the functor of their epilogue, and their entry.

The functor is a pointwise one over (row q, column l), `load` and `visit` as in every loop; the
product itself is given lane by lane (`give`) before `visit`.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.codegen.body import functor
from fusewright.codegen.entry import bind, bound, narrow_text, vector_text
from fusewright.codegen.form import Form, value_dtypes
from fusewright.codegen.lanes import indented
from fusewright.codegen.source import Entry
from fusewright.codegen.text import comment, identifier, unique_names
from fusewright.errors import CodegenError
from fusewright.loop import Load, LoopKernel, Store
from fusewright.product import ProductKernel
from fusewright.schedule import Schedule, lanes_fit
from fusewright.sweep import sweeps
from fusewright.window import WindowKernel

Ended = ProductKernel | WindowKernel

VECTOR = 4  # columns


def ending_form(kernel: Ended) -> Form:
    """The epilogue as the printers take it, its axes as they are: the last one is the columns."""
    identifier(kernel.name)
    dtypes = value_dtypes(kernel.epilogue)
    whole = kernel.epilogue.outer
    if kernel.epilogue.inner or not whole or whole[-1].size != kernel.columns:
        raise CodegenError(f"kernel {kernel.name}: the epilogue does not run over the result")
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
    epilogue = replace(kernel.epilogue, name=kernel.name, arguments=arguments)
    return Form(
        epilogue,
        Schedule("pointwise", lanes=_lanes(kernel, epilogue)),
        sweeps(epilogue),
        unique_names(dtypes, (*symbols.values(), *pointers.values())),
        {each.name: pointers[f"{each.name}_ptr"] for each in kernel.arguments},
        symbols,
        dtypes,
        "cuda",
        {},
        kernel.product,
    )


def _lanes(kernel: Ended, epilogue: LoopKernel) -> int:
    """Columns that a thread of the epilogue takes at once, if pointers are aligned."""
    return VECTOR if lanes_fit(_in_memory(kernel, epilogue), "pointwise", VECTOR) else 1


def _in_memory(kernel: Ended, epilogue: LoopKernel) -> LoopKernel:
    """A kernel of nothing but the epilogue's accesses that go to memory."""
    accesses = [item for item in epilogue.body if isinstance(item, Load | Store)]
    kept = [
        Load(f"access_{at}", item.dtype, item.access)
        for at, item in enumerate(accesses)
        if item != kernel.given
    ]
    return replace(epilogue, body=tuple(kept))


def vectors_text(kernel: Ended, form: Form) -> str:
    """Whether vectors are whole and aligned, as a test of pointers and symbols."""
    if form.schedule.lanes == 1:
        return "false"
    return vector_text(replace(form, kernel=_in_memory(kernel, form.kernel)))


def ending_lines(kernel: Ended, entry: Entry, form: Form, title: str, body: list[str]) -> list[str]:
    """The functor, its binding and the extern "C" function with this body."""
    head = [f"// {kernel.name}: {comment(kernel.summary)}", f"// {comment(title)}"]
    parameters = [f"void* {form.pointers[each.name]}" for each in kernel.arguments]
    parameters += [f"int64_t {name}" for name in form.symbols.values()]
    parameters += ["int64_t terms"] if entry.terms else []
    parameters += ["void* workspace", "int where", "void* stream"]
    return [
        "namespace {",
        *head,
        *functor(form),
        *bind(form),
        "}  // namespace",
        f'extern "C" int {kernel.name}({", ".join(parameters)}) {{',
        *indented([f"const bool vectors = {vectors_text(kernel, form)};", *body]),
        "}",
    ]


def body_text(form: Form) -> str:
    """The functor, bound to the entry's arguments."""
    return bound(form, "int" if narrow_text(form) == "true" else "int64_t")


def pointer_text(form: Form, kind: str, name: str) -> str:
    return f"static_cast<const {kind}*>({form.pointers[name]})"
