"""A matrix product in C++: how its entry hands the operands to the kernel."""

from __future__ import annotations

from dataclasses import replace

from fusewright.codegen.epilogue import ending_lines, pointer_text
from fusewright.codegen.form import Form
from fusewright.codegen.source import ALIGNMENT, Entry, Rounded, Workspace, macro
from fusewright.cost.matmul import TILE_COLUMNS, tiles_for
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import ONE, Dim
from fusewright.ir.matmul import ProductKernel, RawOperand, SplitOperand
from fusewright.ir.operators import STORAGE_TYPES
from fusewright.schedule.sweeps import part_bytes, sweeps
from fusewright.schedule.tensor_core import ProductSchedule

SPLIT_HEADER = "sm90/matmul/sm90_rounded_gemm.cuh"
HALF_HEADER = "sm90/matmul/sm90_half_gemm.cuh"
COUNT_BYTES = 8192  # kCountBytes of sm90_split_k.cuh
ACROSS_COLUMNS = 32  # kRowPart of sm90_epilogue.cuh: what a part of a row covers at least


def product_header(kernel: ProductKernel) -> str:
    return SPLIT_HEADER if isinstance(kernel.b, SplitOperand) else HALF_HEADER


def product_entry(kernel: ProductKernel, schedule: ProductSchedule) -> Entry:
    names = tuple(each.name for each in kernel.arguments)
    workspace = _parts_workspace(kernel, schedule)
    if schedule.rounded_from:
        room = (*kernel.rounded_bytes, Dim(ALIGNMENT))
        rounded = Rounded(room, kernel.rounded_rows, schedule.rounded_from)
        workspace = replace(workspace, rounded=rounded)
    terms = "products" if isinstance(kernel.b, SplitOperand) else ""
    return Entry(kernel.name, names, kernel.symbols, workspace, terms)


def product_lines(kernel: ProductKernel, form: Form, schedule: ProductSchedule) -> list[str]:
    title = f"product of {kernel.rows} x {kernel.columns} over {kernel.contracted}"
    title += "" if kernel.batches == ONE else f", {kernel.batches} of them"
    sizes = (kernel.columns, kernel.rows, kernel.contracted, kernel.batches)
    extents = f"const fw::ProductExtents extents{{{', '.join(map(form.size, sizes))}}};"
    if isinstance(kernel.b, SplitOperand):
        parts = _parts_workspace(kernel, schedule)
        body = _split_body(kernel.a, kernel.b, form, schedule, parts)
    else:
        body = _half_body(kernel.a, kernel.b, form, schedule)
    behind = f"static_cast<char*>(workspace) + {_shared_bytes(schedule)}"
    reduced = behind if schedule.shared_tiles else "workspace"
    return ending_lines(kernel, (form,), title, [extents, *body], reduced)


def _shared_bytes(schedule: ProductSchedule) -> int:
    """Room for the parts of tiles that thread blocks share (sm90_split_k.cuh)."""
    if not schedule.shared_tiles:
        return 0
    return COUNT_BYTES + schedule.shared_tiles * 4 * schedule.tile_rows * TILE_COLUMNS


def _parts_workspace(kernel: ProductKernel, schedule: ProductSchedule) -> Workspace:
    """Room for parts of tiles, then for what each tile has reduced; `lines_of` in sm90_tiles.cuh
    says how many there are."""
    shared = _shared_bytes(schedule)
    if kernel.reduces is Reduces.NOTHING:
        return Workspace(fixed=shared)
    line = kernel.epilogue.outer_numel * part_bytes(sweeps(kernel.epilogue))
    if kernel.reduces is Reduces.DOWN:
        rows = min(tiles_for(kernel.a.dtype))
        return Workspace(line * kernel.batches, kernel.rows, rows, shared)
    return Workspace(line, kernel.columns, ACROSS_COLUMNS, shared)


def _split_body(
    a: RawOperand, b: SplitOperand, form: Form, schedule: ProductSchedule, parts: Workspace
) -> list[str]:
    strides = (a.free_stride, a.contracted_stride, a.batch_stride)
    raw = [pointer_text(form, "float", a.buffer), *map(form.size, strides)]
    halves = [pointer_text(form, "fw::half", name) for name in (b.hi, b.lo)]
    split = [*halves, pointer_text(form, "float", b.inverse), form.size(b.row_stride)]
    flags = [_flag(a.free_stride == ONE), _flag(b.contracted_rows)]
    template = ", ".join([macro("products"), str(schedule.tile_rows), *flags])
    operands = [
        f"const fw::RawOperand a{{{', '.join(raw)}}};",
        f"const fw::SplitOperand b{{{', '.join(split)}}};",
    ]
    given = "where, stream"
    if schedule.shared_tiles:
        given += f", fw::ProductParts{{workspace, {_shared_bytes(schedule)}}}"
    if not schedule.rounded_from:
        call = f"fw::product<{template}>(end, vectors, a, b, extents, {given})"
        return [*operands, f"return {call};"]
    return [
        *operands,
        f"void* const halves = {parts.behind(form.size)};",
        f"return fw::rounded_product<{template}>(end, vectors, a, b, extents, "
        f"{schedule.rounded_from}, halves, {given});",
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
    call = f"fw::half_product<{template}>(end, vectors, a, b, extents, where, stream)"
    return [*lines, f"return {call};"]


def _flag(value: bool) -> str:
    return str(value).lower()
