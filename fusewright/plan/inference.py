"""Inference with the kernels of forward.

Forward computes what inference does, and stores more: the values that backward reads. Where these
are few bytes, such as a norm's statistics, inference needs no kernel of its own: forward's runs
and gets no memory for them, which it then does not write. So fewer kernels are compiled and read.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.epilogue import WithEpilogue
from fusewright.ir.graph import ITEM_BYTES, Sizes
from fusewright.ir.kernel import Kernel
from fusewright.ir.loop import LoopKernel, level
from fusewright.plan.steps import Fused, Plan

# How much forward's kernel may compute: so many times what inference computes, or operations for
# each byte, at which every GPU still waits for memory.
MOST_OPERATIONS, OPERATIONS_FOR_A_BYTE = 1.25, 1
# The further outputs, as a share of the bytes that inference moves. A schedule was chosen with
# them, and nothing tells that it is the best one without, unless they hardly count.
MOST_MORE_BYTES = 1 / 64


def with_kernels_of(forward: Plan, inference: Plan, sizes: Sizes) -> Plan:
    """The plan of inference, with forward's kernels where these compute the same and more."""
    makers = {name: step for step in forward.kernels for name in step.outputs}
    steps = list(inference.steps)
    specs, known = dict(inference.specs), dict(forward.specs)
    for at, step in enumerate(steps):
        maker = makers.get(step.outputs[0]) if isinstance(step, Fused) else None
        if maker is None or not isinstance(step, Fused) or not _covers(maker, step, sizes):
            continue
        others = [name for name in maker.outputs if name not in step.outputs]
        if any(name in specs for name in others):  # another step of inference computes it
            continue
        more = sum(known[name].numel.at(sizes) * ITEM_BYTES[known[name].dtype] for name in others)
        if more > MOST_MORE_BYTES * step.bytes_moved:
            continue
        specs |= {name: known[name] for name in others}
        steps[at] = replace(maker, bytes_moved=step.bytes_moved, operations=step.operations)
    return replace(inference, steps=tuple(steps), specs=tuple(specs.items()))


def _covers(maker: Fused, step: Fused, sizes: Sizes) -> bool:
    """Whether the kernel of `maker` is that of `step`, or has further outputs and little else."""
    if maker.inputs != step.inputs or not set(step.outputs) <= set(maker.outputs):
        return False
    loops = loop_of(maker.kernel), loop_of(step.kernel)
    if loops[0] is None or loops[1] is None or level(loops[0]).phases != level(loops[1]).phases:
        return False
    most = MOST_OPERATIONS * step.operations, OPERATIONS_FOR_A_BYTE * step.bytes_moved
    if maker.kernel.operations(sizes) > max(most):
        return False
    names = [each.name for each in maker.kernel.arguments[len(maker.inputs) :]]
    pairs = zip(maker.outputs, names, strict=True)
    fewer = without(maker.kernel, frozenset(n for value, n in pairs if value not in step.outputs))
    return fewer.as_repeated().canonical() == step.kernel.as_repeated().canonical()


def loop_of(kernel: Kernel) -> LoopKernel | None:
    """The loop of a kernel that can leave outputs out."""
    if isinstance(kernel, WithEpilogue):
        return kernel.epilogue
    return kernel if isinstance(kernel, LoopKernel) else None


def without(kernel: Kernel, outputs: frozenset[str]) -> Kernel:
    """The kernel without these outputs, and without what only they need."""
    if isinstance(kernel, WithEpilogue):
        return replace(kernel, epilogue=kernel.epilogue.without(outputs))
    assert isinstance(kernel, LoopKernel)
    return kernel.without(outputs)
