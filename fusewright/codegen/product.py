"""A matrix product in C++: the functor of its epilogue and the entry that launches the kernel.

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
from fusewright.ir import ONE, ZERO
from fusewright.loop import Load, LoopKernel, Store
from fusewright.product import ProductKernel, SplitOperand
from fusewright.schedule import ProductSchedule, Schedule, lanes_fit
from fusewright.sweep import sweeps

HEADER = "sm90_fp16x3_gemm.cuh"
VECTOR = 4  # columns


def product_form(kernel: ProductKernel) -> Form:
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


def _lanes(kernel: ProductKernel, epilogue: LoopKernel) -> int:
    """Columns that a thread of the epilogue takes at once, if pointers are aligned."""
    return VECTOR if lanes_fit(_in_memory(kernel, epilogue), "pointwise", VECTOR) else 1


def _in_memory(kernel: ProductKernel, epilogue: LoopKernel) -> LoopKernel:
    """A kernel of nothing but the epilogue's accesses that go to memory."""
    accesses = [item for item in epilogue.body if isinstance(item, Load | Store)]
    kept = [
        Load(f"access_{at}", item.dtype, item.access)
        for at, item in enumerate(accesses)
        if item != kernel.given
    ]
    return replace(epilogue, body=tuple(kept))


def _vectors(kernel: ProductKernel, form: Form) -> str:
    """Whether vectors are whole and aligned, as a test of pointers and symbols."""
    if form.schedule.lanes == 1:
        return "false"
    return vector_text(replace(form, kernel=_in_memory(kernel, form.kernel)))


def product_entry(kernel: ProductKernel) -> Entry:
    names = tuple(each.name for each in kernel.arguments)
    return Entry(kernel.name, names, kernel.symbols, ZERO, terms=True)


def product_lines(kernel: ProductKernel, form: Form, schedule: ProductSchedule) -> list[str]:
    """The functor, its binding and the extern "C" function."""
    sizes = f"{kernel.rows} x {kernel.columns} over {kernel.contracted}"
    sizes += "" if kernel.batches == ONE else f", {kernel.batches} of them"
    head = [
        f"// {kernel.name}: {comment(kernel.summary)}",
        f"// product of {comment(sizes)}",
    ]
    body = ["namespace {", *head, *functor(form), *bind(form), "}  // namespace"]
    return [*body, *_function(kernel, form, schedule)]


def _pointer(form: Form, kind: str, name: str) -> str:
    return f"static_cast<const {kind}*>({form.pointers[name]})"


def _function(kernel: ProductKernel, form: Form, schedule: ProductSchedule) -> list[str]:
    parameters = [f"void* {form.pointers[each.name]}" for each in kernel.arguments]
    parameters += [f"int64_t {name}" for name in form.symbols.values()]
    parameters += ["int64_t terms", "void* workspace", "int where", "void* stream"]
    a, b = kernel.a, kernel.b
    assert isinstance(b, SplitOperand)
    strides = (a.free_stride, a.contracted_stride, a.batch_stride)
    raw = [_pointer(form, "float", a.buffer), *map(form.size, strides)]
    halves = [_pointer(form, "fw::half", name) for name in (b.hi, b.lo)]
    split = [*halves, _pointer(form, "float", b.inverse), form.size(b.row_stride)]
    flags = [str(flag).lower() for flag in (a.free_stride == ONE, b.contracted_rows)]
    template = ", ".join([str(schedule.tile_rows), *flags])
    index = "int" if narrow_text(form) == "true" else "int64_t"
    sizes = (kernel.columns, kernel.rows, kernel.contracted, kernel.batches)
    body = [
        f"const fw::RawOperand a{{{', '.join(raw)}}};",
        f"const fw::SplitOperand b{{{', '.join(split)}}};",
        f"const fw::ProductExtents extents{{{', '.join(map(form.size, sizes))}}};",
        f"const bool vectors = {_vectors(kernel, form)};",
        f"return fw::product<{template}>({bound(form, index)}, vectors, a, b, extents, terms, "
        "where, stream);",
    ]
    return [f'extern "C" int {kernel.name}({", ".join(parameters)}) {{', *indented(body), "}"]
