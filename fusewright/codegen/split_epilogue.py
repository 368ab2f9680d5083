"""Splits an epilogue that both stores elements and reduces them over a convolution's positions.

Each of the two loops visits the elements in its best order, and has only the instructions that its
own stores need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusewright.ir.graph import ONE
from fusewright.ir.loop import Axis, Instruction, LoopKernel, Reduce, Store, reads
from fusewright.schedule.coalesce import moves_of, restrided
from fusewright.schedule.sweeps import sweeps

PLANE = "plane"  # y and x as one axis


def stored(epilogue: LoopKernel, accumulator: str) -> LoopKernel | None:
    """The loop that stores elements, without reductions, or None if no element is stored."""
    stores = sweeps(epilogue).inner_stores
    if not stores:
        return None
    made = _made_for(epilogue, stores, accumulator)
    names = ("image", "channel", "member", "y", "x")
    order = [
        at
        for name in names
        for at, axis in enumerate(epilogue.axes)
        if axis.name == name and axis.size != ONE
    ]
    body = restrided(made.body, lambda strides: tuple(strides[at] for at in order))
    return replace(made, outer=tuple(epilogue.axes[at] for at in order), inner=(), body=body)


def reduced(epilogue: LoopKernel, accumulator: str) -> LoopKernel:
    """The loop that reduces, with the stores of its results. If all accesses allow it, y and x are
    merged to one axis: a thread knows both, and the merged index needs no division."""
    made = _made_for(epilogue, sweeps(epilogue).row_stores, accumulator)
    *others, y, x = made.inner
    strides = [moves for each in made.body for moves in moves_of(each)]
    if y.size != ONE and any(each[-2] != each[-1] * x.size for each in strides):
        return made
    plane = Axis(PLANE, y.size * x.size)
    body = restrided(made.body, lambda each: (*each[:-2], each[-1]))
    return replace(made, inner=(*others, plane), body=body)


def _made_for(epilogue: LoopKernel, stores: Iterable[Store], accumulator: str) -> LoopKernel:
    """The loop with only these stores, the instructions that they need, and the accumulator."""
    kept: list[Instruction] = []
    wanted, roots = {accumulator}, set(stores)
    for item in reversed(epilogue.body):
        if isinstance(item, Store):
            is_kept = item in roots
        elif isinstance(item, Reduce):
            is_kept = not wanted.isdisjoint((item.name, item.second))
        else:
            is_kept = item.name in wanted
        if is_kept:
            kept.append(item)
            wanted.update(reads(item))
    return replace(epilogue, body=tuple(reversed(kept)))
