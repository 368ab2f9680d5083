"""From an assembled body to the finished `LoopKernel`, and from any kernel to its step."""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import TensorSpec
from fusewright.ir.kernel import Kernel
from fusewright.ir.loop import Argument, Axis, Instruction, Load, LoopKernel, Reduce, Store, reads
from fusewright.plan.assemble import Assembled
from fusewright.plan.domain import Domain
from fusewright.plan.steps import Fused
from fusewright.plan.values import Values
from fusewright.schedule.coalesce import restrided


def kernel_of(
    assembled: Assembled, name: str, summary: str, stored: tuple[str, ...], values: Values
) -> LoopKernel:
    """The finished kernel: outer axes first, arguments in order, only the wanted stores."""
    domain = assembled.domain
    order = (*domain.kept_axes, *domain.reduced_axes)
    axes = tuple(Axis(f"i{axis}", domain.sizes[axis]) for axis in order)
    live = _live((*assembled.body, *(assembled.stores[item] for item in stored)))
    if order != tuple(range(len(order))):
        live = restrided(live, lambda strides: tuple(strides[axis] for axis in order))
    outer = len(domain.kept_axes)
    loaded = {item.access.buffer for item in live if isinstance(item, Load)}
    read = (each for each in assembled.loads if each in loaded)
    arguments = [Argument(each, values.spec(each).dtype, False) for each in read]
    arguments += [Argument(item, values.spec(item).dtype, True) for item in stored]
    symbols = tuple(sorted(values.sizes))
    return LoopKernel(name, summary, axes[:outer], axes[outer:], tuple(arguments), symbols, live)


def pointwise_of(assembled: Assembled, stored: str, values: Values) -> LoopKernel:
    """The kernel that stores one value of a body alone, over all axes in their order."""
    kept = Domain(assembled.domain.sizes, (False,) * len(assembled.domain.sizes))
    return kernel_of(replace(assembled, domain=kept), "source", "", (stored,), values)


def step_of(
    kernel: Kernel,
    outputs: tuple[str, ...],
    operators: tuple[str, ...],
    values: Values,
    staged: tuple[tuple[str, TensorSpec], ...] = (),
) -> Fused:
    """The step of a kernel whose arguments have the names of the values."""
    inputs = tuple(each.name for each in kernel.arguments if not each.is_output)
    held = {name: values.bytes_of(name) for name in inputs if values.has_spec(name)}
    return Fused(
        name=kernel.name,
        kernel=kernel,
        inputs=inputs,
        outputs=(*outputs, *(name for name, _ in staged)),
        operators=operators,
        bytes_moved=kernel.bytes_moved(values.sizes, held),
        operations=kernel.operations(values.sizes),
        staged=staged,
    )


def _live(body: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """The body without values that no store depends on."""
    needed: set[str] = set()
    kept: list[Instruction] = []
    for item in reversed(body):
        match item:
            case Store():
                needed.add(item.value)
            case Reduce():
                if item.name not in needed and item.second not in needed:
                    continue
                needed.add(item.operand)
            case _:
                if item.name not in needed:
                    continue
                needed.update(reads(item))
        kept.append(item)
    return tuple(reversed(kept))
