"""A matrix product in C++: how its entry hands the operands to the kernel."""

from __future__ import annotations

from fusewright.codegen.ending import body_text, ending_lines, pointer_text
from fusewright.codegen.form import Form
from fusewright.codegen.source import Entry
from fusewright.ir import ONE, ZERO
from fusewright.optable import STORAGE_TYPES
from fusewright.product import ProductKernel, RawOperand, SplitOperand
from fusewright.schedule import ProductSchedule

SPLIT_HEADER = "sm90_fp16x3_gemm.cuh"
HALF_HEADER = "sm90_half_gemm.cuh"


def product_header(kernel: ProductKernel) -> str:
    return SPLIT_HEADER if isinstance(kernel.b, SplitOperand) else HALF_HEADER


def product_entry(kernel: ProductKernel) -> Entry:
    names = tuple(each.name for each in kernel.arguments)
    terms = "products" if isinstance(kernel.b, SplitOperand) else ""
    return Entry(kernel.name, names, kernel.symbols, ZERO, terms)


def product_lines(kernel: ProductKernel, form: Form, schedule: ProductSchedule) -> list[str]:
    title = f"product of {kernel.rows} x {kernel.columns} over {kernel.contracted}"
    title += "" if kernel.batches == ONE else f", {kernel.batches} of them"
    sizes = (kernel.columns, kernel.rows, kernel.contracted, kernel.batches)
    extents = f"const fw::ProductExtents extents{{{', '.join(map(form.size, sizes))}}};"
    if isinstance(kernel.b, SplitOperand):
        body = _split_body(kernel.a, kernel.b, form, schedule)
    else:
        body = _half_body(kernel.a, kernel.b, form, schedule)
    return ending_lines(kernel, product_entry(kernel), form, title, [extents, *body])


def _split_body(a: RawOperand, b: SplitOperand, form: Form, schedule: ProductSchedule) -> list[str]:
    strides = (a.free_stride, a.contracted_stride, a.batch_stride)
    raw = [pointer_text(form, "float", a.buffer), *map(form.size, strides)]
    halves = [pointer_text(form, "fw::half", name) for name in (b.hi, b.lo)]
    split = [*halves, pointer_text(form, "float", b.inverse), form.size(b.row_stride)]
    flags = [_flag(a.free_stride == ONE), _flag(b.contracted_rows)]
    template = ", ".join([str(schedule.tile_rows), *flags])
    return [
        f"const fw::RawOperand a{{{', '.join(raw)}}};",
        f"const fw::SplitOperand b{{{', '.join(split)}}};",
        f"return fw::product<{template}>({body_text(form)}, vectors, a, b, extents, terms, where, "
        "stream);",
    ]


def _half_body(a: RawOperand, b: RawOperand, form: Form, schedule: ProductSchedule) -> list[str]:
    kind = STORAGE_TYPES[a.dtype]
    lines = []
    for name, operand in (("a", a), ("b", b)):
        strides = map(form.size, (operand.row_stride, operand.batch_stride))
        parts = [pointer_text(form, kind, operand.buffer), *strides, "nullptr"]
        lines.append(f"const fw::HalfOperand<{kind}> {name}{{{', '.join(parts)}}};")
    flags = [_flag(a.free_major), _flag(b.free_major)]
    template = ", ".join([kind, *flags, str(schedule.tile_rows)])
    call = f"fw::half_product<{template}>({body_text(form)}, vectors, a, b, extents, where, stream)"
    return [*lines, f"return {call};"]


def _flag(value: bool) -> str:
    return str(value).lower()
