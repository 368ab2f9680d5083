"""When two kernels are the same kernel: equal but for the names of values and buffers."""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.convolution import WindowKernel
from fusewright.ir.loop import (
    Access,
    Apply,
    Instruction,
    Load,
    LoopKernel,
    Reduce,
    Scan,
    Store,
)
from fusewright.ir.matmul import ProductKernel
from fusewright.ir.weight_gradient import GradientKernel

Kernel = LoopKernel | ProductKernel | WindowKernel | GradientKernel


def canonical(kernel: Kernel) -> Kernel:
    """The kernel under numbered names, so that equal kernels compare equal."""
    buffers = {each.name: f"b{at}" for at, each in enumerate(kernel.arguments)}
    if isinstance(kernel, LoopKernel):
        return _canonical(kernel, buffers)
    if isinstance(kernel, GradientKernel):
        prologue = _prologue(kernel.prologue, buffers)
        return replace(kernel.renamed(buffers), name="", summary="", prologue=prologue)
    buffers = {kernel.given.access.buffer: "given"} | buffers
    made = kernel.renamed(buffers)
    if isinstance(made, WindowKernel):
        made = replace(made, prologue=_prologue(made.prologue, buffers))
    return replace(
        made,
        name="",
        summary="",
        epilogue=_canonical(kernel.epilogue, buffers),
        product=_values(kernel.epilogue)[kernel.product],
    )


def _prologue(prologue: LoopKernel | None, buffers: dict[str, str]) -> LoopKernel | None:
    if prologue is None:
        return None
    (computed,) = (each.name for each in prologue.arguments if each.is_output)
    return _canonical(prologue, {**buffers, computed: "computed"})


def _values(kernel: LoopKernel) -> dict[str, str]:
    values: dict[str, str] = {"": ""}
    for item in kernel.body:
        for name in (*([] if isinstance(item, Store) else [item.name]), *_second(item)):
            values.setdefault(name, f"v{len(values)}")
    return values


def _canonical(kernel: LoopKernel, buffers: dict[str, str]) -> LoopKernel:
    values = _values(kernel)
    axes = {axis.name: f"i{number}" for number, axis in enumerate(kernel.axes)}
    return replace(
        kernel,
        name="",
        summary="",
        outer=tuple(replace(axis, name=axes[axis.name]) for axis in kernel.outer),
        inner=tuple(replace(axis, name=axes[axis.name]) for axis in kernel.inner),
        arguments=tuple(replace(each, name=buffers[each.name]) for each in kernel.arguments),
        body=tuple(_numbered(item, values, buffers) for item in kernel.body),
    )


def _second(item: Instruction) -> tuple[str, ...]:
    return (item.second,) if isinstance(item, Reduce) and item.second else ()


def _numbered(item: Instruction, values: dict[str, str], buffers: dict[str, str]) -> Instruction:
    if isinstance(item, Store):
        return replace(item, value=values[item.value], access=_at(item.access, buffers))
    made: Instruction = replace(item, name=values[item.name])
    if isinstance(made, Apply):
        return replace(made, operands=tuple(values[name] for name in made.operands))
    if isinstance(made, Reduce):
        return replace(made, operand=values[made.operand], second=values[made.second])
    if isinstance(made, Scan):
        return replace(made, operand=values[made.operand])
    if isinstance(made, Load):
        return replace(made, access=_at(made.access, buffers))
    return made


def _at(access: Access, buffers: dict[str, str]) -> Access:
    return replace(access, buffer=buffers[access.buffer])
