"""The record of matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusewright.codegen.matmul import matmul_workspace, render_matmul
from fusewright.cost.matmul import best_us, multiplied_as, pytorch_us, tiles_for
from fusewright.ir.graph import Sizes
from fusewright.ir.matmul import MatmulKernel, RawOperand, SplitOperand
from fusewright.kinds.kind import Kind
from fusewright.kinds.loop import largest, loop_elements, walked
from fusewright.schedule.tensor_core import MatmulSchedule, choose_matmul
from fusewright.target.target import Target


def _permits(kernel: MatmulKernel, choice: MatmulSchedule, target: Target) -> bool:
    if choice.rounded_from < 0 or choice.shared_tiles < 0:
        return False
    splits = isinstance(kernel.b, SplitOperand)
    return choice.tile_rows in tiles_for(kernel.a.dtype) and (splits or not choice.rounded_from)


def _variations(
    kernel: MatmulKernel, first: MatmulSchedule, target: Target, sizes: Sizes
) -> Iterator[MatmulSchedule]:
    return (replace(first, tile_rows=rows) for rows in tiles_for(kernel.a.dtype))


def _operands(kernel: MatmulKernel, sizes: Sizes) -> Iterator[tuple[str, int]]:
    rows, columns, contracted, batches = kernel.extents(sizes)
    for operand, free in ((kernel.a, columns), (kernel.b, rows)):
        if isinstance(operand, RawOperand):
            strides = (operand.free_stride, operand.contracted_stride, operand.batch_stride)
            yield operand.buffer, walked((free, contracted, batches), strides, sizes)
        else:
            stored = batches * (contracted if operand.contracted_rows else rows)
            count = stored * operand.row_stride.at(sizes)
            yield from ((operand.hi, count), (operand.lo, count), (operand.inverse, stored))


def _elements(kernel: MatmulKernel, sizes: Sizes) -> dict[str, int]:
    return largest(*loop_elements(kernel.epilogue, sizes).items(), *_operands(kernel, sizes))


def _times_us(kernel: MatmulKernel, target: Target, sizes: Sizes) -> tuple[float, float]:
    of, dtype = kernel.extents(sizes), multiplied_as(kernel.a.dtype, target)
    return best_us(of, target, dtype), pytorch_us(of, target, dtype)


MATMUL = Kind(
    kernel=MatmulKernel,
    words="matmul kernel",
    schedules={"matmul": MatmulSchedule},
    choose=choose_matmul,
    permits=_permits,
    variations=_variations,
    workspace=lambda kernel, choice, target: matmul_workspace(kernel, choice),
    render=lambda kernel, choice, target: render_matmul(kernel, choice),
    elements=_elements,
    summands=lambda kernel, sizes: max(1, kernel.contracted.at(sizes)),
    times_us=_times_us,
)
