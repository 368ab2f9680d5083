"""A matmul in C++: its entry, which passes the operands to the kernel."""

from __future__ import annotations

from dataclasses import replace

from fusewright.codegen.epilogue import (
    by_columns,
    end_text,
    epilogue_forms,
    epilogue_lines,
    pointer_text,
)
from fusewright.codegen.form import Form
from fusewright.codegen.source import ALIGNMENT, Rendered, RoundedWorkspace, Workspace, macro
from fusewright.cost.matmul import TILE_COLUMNS, tiles_for
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import ONE, ZERO, Dim
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import MatmulKernel, RawOperand, SplitOperand
from fusewright.ir.operators import STORAGE_TYPES
from fusewright.schedule.coalesce import merge
from fusewright.schedule.sweeps import part_bytes, sweeps
from fusewright.schedule.tensor_core import MatmulSchedule

SPLIT_HEADER = "sm90/matmul/sm90_rounded_gemm.cuh"
HALF_HEADER = "sm90/matmul/sm90_half_gemm.cuh"
VECTOR = 4  # columns
WEIGHT = 17
COUNT_BYTES = 8192  # kCountBytes of sm90_split_k.cuh
ACROSS_COLUMNS = 32  # kRowPart of sm90_epilogue.cuh: the least columns of a row's part


def matmul_workspace(kernel: MatmulKernel, schedule: MatmulSchedule) -> Workspace:
    workspace = _parts_workspace(kernel, schedule)
    if not schedule.rounded_from:
        return workspace
    room = (*kernel.rounded_bytes, Dim(ALIGNMENT))
    rounded = RoundedWorkspace(room, kernel.rounded_rows, schedule.rounded_from)
    return replace(workspace, rounded=rounded)


def render_matmul(kernel: MatmulKernel, schedule: MatmulSchedule) -> Rendered:
    epilogue = _merged(kernel.epilogue if kernel.epilogue.inner else by_columns(kernel))
    (form,) = epilogue_forms(kernel, (epilogue,), (VECTOR,), VECTOR)
    splits = isinstance(kernel.b, SplitOperand)
    return Rendered(
        _lines(kernel, form, schedule),
        WEIGHT,
        names=(form.kernel.name,),
        bodies=(form.kernel,),
        headers=(SPLIT_HEADER if splits else HALF_HEADER,),
        terms="matmuls" if splits else "",
    )


def _merged(part: LoopKernel) -> LoopKernel:
    """The epilogue over as few axes as possible. Each further axis costs a division per element
    (H200, 65536 rows of 768 by 256, as a batch of one: 834 µs)."""
    small, sizes = merge(part), [axis.size for axis in part.axes]
    return small if small.outer and small.inner and ZERO not in sizes else part


def _lines(kernel: MatmulKernel, form: Form, schedule: MatmulSchedule) -> list[str]:
    title = f"matmul of {kernel.rows} x {kernel.columns} over {kernel.contracted}"
    title += "" if kernel.batches == ONE else f", a batch of {kernel.batches}"
    sizes = (kernel.columns, kernel.rows, kernel.contracted, kernel.batches)
    extents = f"const fw::MatmulExtents extents{{{', '.join(map(form.size, sizes))}}};"
    if isinstance(kernel.b, SplitOperand):
        parts = _parts_workspace(kernel, schedule)
        body = _split_body(kernel.a, kernel.b, form, schedule, parts)
    else:
        body = _half_body(kernel.a, kernel.b, form, schedule)
    behind = f"static_cast<char*>(workspace) + {_shared_bytes(schedule)}"
    reduced = behind if schedule.shared_tiles else "workspace"
    return epilogue_lines(kernel, (form,), title, end_text(form, reduced), [extents, *body])


def _shared_bytes(schedule: MatmulSchedule) -> int:
    """Bytes for the parts of tiles that thread blocks share (sm90_split_k.cuh)."""
    if not schedule.shared_tiles:
        return 0
    return COUNT_BYTES + schedule.shared_tiles * 4 * schedule.tile_rows * TILE_COLUMNS


def _parts_workspace(kernel: MatmulKernel, schedule: MatmulSchedule) -> Workspace:
    """Memory for shared parts of tiles, then for the partials of reductions (`partials_of` in
    sm90_tiles.cuh counts them)."""
    shared = _shared_bytes(schedule)
    if kernel.reduces is Reduces.NOTHING:
        return Workspace(fixed=shared)
    partial = kernel.epilogue.outer_numel * part_bytes(sweeps(kernel.epilogue))
    if kernel.reduces is Reduces.DOWN:
        rows = min(tiles_for(kernel.a.dtype))
        return Workspace(partial * kernel.batches, kernel.rows, rows, shared)
    return Workspace(partial, kernel.columns, ACROSS_COLUMNS, shared)


def _split_body(
    a: RawOperand, b: SplitOperand, form: Form, schedule: MatmulSchedule, parts: Workspace
) -> list[str]:
    strides = (a.free_stride, a.contracted_stride, a.batch_stride)
    raw = [pointer_text(form, "float", a.buffer), *map(form.size, strides)]
    high_low = [pointer_text(form, "fw::half", name) for name in (b.hi, b.lo)]
    split = [*high_low, pointer_text(form, "float", b.inverse), form.size(b.row_stride)]
    flags = [_flag(a.free_stride == ONE), _flag(b.contracted_rows)]
    template = ", ".join([macro("matmuls"), str(schedule.tile_rows), *flags])
    operands = [
        f"const fw::RawOperand a{{{', '.join(raw)}}};",
        f"const fw::SplitOperand b{{{', '.join(split)}}};",
    ]
    given = "where, stream"
    if schedule.shared_tiles:
        given += f", fw::SplitKParts{{workspace, {_shared_bytes(schedule)}}}"
    if not schedule.rounded_from:
        call = f"fw::fp16x3_matmul<{template}>(end, vectors, a, b, extents, {given})"
        return [*operands, f"return {call};"]
    return [
        *operands,
        f"void* const rounded = {parts.behind(form.size)};",
        f"return fw::rounded_matmul<{template}>(end, vectors, a, b, extents, "
        f"{schedule.rounded_from}, rounded, {given});",
    ]


def _half_body(a: RawOperand, b: RawOperand, form: Form, schedule: MatmulSchedule) -> list[str]:
    kind = STORAGE_TYPES[a.dtype]
    lines = []
    for name, operand in (("a", a), ("b", b)):
        strides = map(form.size, (operand.row_stride, operand.batch_stride))
        parts = [pointer_text(form, kind, operand.buffer), *strides, "nullptr"]
        lines.append(f"const fw::HalfOperand<{kind}> {name}{{{', '.join(parts)}}};")
    flags = [_flag(a.free_major), _flag(b.free_major)]
    template = ", ".join([kind, *flags, str(schedule.tile_rows)])
    call = f"fw::half_matmul<{template}>(end, vectors, a, b, extents, where, stream)"
    return [*lines, f"return {call};"]


def _flag(value: bool) -> str:
    return str(value).lower()
