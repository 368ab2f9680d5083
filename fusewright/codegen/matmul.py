"""A matmul in C++: its entry, which passes the operands to the kernel."""

from __future__ import annotations

from dataclasses import replace

from fusewright.codegen.entry import for_entry, returned
from fusewright.codegen.epilogue import (
    by_columns,
    end_lines,
    epilogue_forms,
    epilogue_lines,
    pointer,
)
from fusewright.codegen.equation import equations, told
from fusewright.codegen.form import Form
from fusewright.codegen.functor import functor
from fusewright.codegen.layout import definition
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
        _lines(kernel, for_entry(form, kernel), schedule),
        WEIGHT,
        names=(form.kernel.name,),
        comment=_comment(kernel, form),
        functors=(functor(form),),
        bodies=(form.kernel,),
        headers=(SPLIT_HEADER if splits else HALF_HEADER,),
        terms="matmuls" if splits else "",
    )


def _merged(part: LoopKernel) -> LoopKernel:
    """The epilogue over as few axes as possible. Each further axis costs a division per element
    (H200, 65536 rows of 768 by 256, as a batch of one: 834 µs)."""
    small, sizes = merge(part), [axis.size for axis in part.axes]
    return small if small.outer and small.inner and ZERO not in sizes else part


def _comment(kernel: MatmulKernel, form: Form) -> tuple[str, ...]:
    a = form.pointers[kernel.a.buffer].removesuffix("_ptr")
    if isinstance(kernel.b, SplitOperand):
        b = form.pointers[kernel.b.hi].removesuffix("_ptr").removesuffix("_hi")
    else:
        b = form.pointers[kernel.b.buffer].removesuffix("_ptr")
    batch = "" if kernel.batches == ONE else "n, "
    total = f"sum_k({b}[{batch}i, k] * {a}[{batch}k, j])"
    sizes = f"i < {kernel.rows}, j < {kernel.columns}, k < {kernel.contracted}"
    sizes += f", n < {kernel.batches}" if batch else ""
    if not batch and len(form.kernel.outer) == 1 == len(form.kernel.inner):
        letters = "ij" if form.is_row else "ji"
        return told(kernel, equations(form, total, letters), sizes)
    title = f"{kernel.operator}[{batch}i, j] = {total}"
    return told(kernel, [title, *equations(form, kernel.operator)], sizes)


def _lines(kernel: MatmulKernel, form: Form, schedule: MatmulSchedule) -> list[str]:
    sizes = (kernel.columns, kernel.rows, kernel.contracted, kernel.batches)
    extents = f"const fw::MatmulExtents extents{{{', '.join(map(form.size, sizes))}}};"
    if isinstance(kernel.b, SplitOperand):
        parts = _parts_workspace(kernel, schedule)
        body = _split_body(kernel.a, kernel.b, form, schedule, parts)
    else:
        body = _half_body(kernel.a, kernel.b, form, schedule)
    behind = f"static_cast<char*>(workspace) + {_shared_bytes(schedule)}"
    reduced = behind if schedule.shared_tiles else "workspace"
    return epilogue_lines(kernel, (form,), end_lines(form, reduced), [extents, *body])


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
    raw = ", ".join(map(form.size, strides))
    flags = [_flag(a.free_stride == ONE), _flag(b.contracted_rows)]
    template = ", ".join([macro("matmuls"), str(schedule.tile_rows), *flags])
    split = ", ".join(pointer(form, each) for each in (b.hi, b.lo, b.inverse))
    operands = [
        f"const fw::RawOperand a{{{pointer(form, a.buffer)}, {raw}}};",
        f"const fw::SplitOperand b{{{split}, {form.size(b.row_stride)}}};",
    ]
    given = ["where", "stream"]
    if schedule.shared_tiles:
        operands.append(f"const fw::SplitKParts parts{{workspace, {_shared_bytes(schedule)}}};")
        given.append("parts")
    first = ["end", "vectors", "a", "b", "extents"]
    if not schedule.rounded_from:
        return [*operands, *returned(f"fw::fp16x3_matmul<{template}>", [*first, *given])]
    operands += definition("void* const rounded", parts.behind(form.size))
    first += [str(schedule.rounded_from), "rounded"]
    return [*operands, *returned(f"fw::rounded_matmul<{template}>", [*first, *given])]


def _half_body(a: RawOperand, b: RawOperand, form: Form, schedule: MatmulSchedule) -> list[str]:
    kind = STORAGE_TYPES[a.dtype]
    lines = []
    for name, operand in (("a", a), ("b", b)):
        strides = map(form.size, (operand.row_stride, operand.batch_stride))
        parts = ", ".join([pointer(form, operand.buffer), *strides, "nullptr"])
        lines.append(f"const fw::HalfOperand<{kind}> {name}{{{parts}}};")
    flags = [_flag(a.free_major), _flag(b.free_major)]
    template = ", ".join([kind, *flags, str(schedule.tile_rows)])
    given = ["end", "vectors", "a", "b", "extents", "where", "stream"]
    return [*lines, *returned(f"fw::half_matmul<{template}>", given)]


def _flag(value: bool) -> str:
    return str(value).lower()
