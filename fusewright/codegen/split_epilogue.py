"""An epilogue that stores elements and reduces them over a window's positions, as two.

Each goes through the elements as is best for it, and has nothing of the other: only the
instructions that its own stores are made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusewright.ir.graph import ONE
from fusewright.ir.loop import Axis, Instruction, LoopKernel, Reduce, Store, reads
from fusewright.schedule.coalesce import moves_of, restrided
from fusewright.schedule.sweeps import sweeps

PLANE = "plane"  # the axis that y and x make


def stored(epilogue: LoopKernel, product: str) -> LoopKernel | None:
    """What is stored for each element, over one space without reductions; None if nothing is."""
    stores = sweeps(epilogue).inner_stores
    if not stores:
        return None
    made = _made_for(epilogue, stores, product)
    names = ("image", "channel", "member", "y", "x")
    order = [
        at
        for name in names
        for at, axis in enumerate(epilogue.axes)
        if axis.name == name and axis.size != ONE
    ]
    body = restrided(made.body, lambda strides: tuple(strides[at] for at in order))
    return replace(made, outer=tuple(epilogue.axes[at] for at in order), inner=(), body=body)


def reduced(epilogue: LoopKernel, product: str) -> LoopKernel:
    """What is reduced, and what becomes of that. Where all accesses walk y and x as one, these are
    one axis: a thread has both and need not divide what it has multiplied."""
    made = _made_for(epilogue, sweeps(epilogue).row_stores, product)
    *others, y, x = made.inner
    strides = [moves for each in made.body for moves in moves_of(each)]
    if y.size != ONE and any(each[-2] != each[-1] * x.size for each in strides):
        return made
    plane = Axis(PLANE, y.size * x.size)
    body = restrided(made.body, lambda each: (*each[:-2], each[-1]))
    return replace(made, inner=(*others, plane), body=body)


def _made_for(epilogue: LoopKernel, stores: Iterable[Store], product: str) -> LoopKernel:
    """What these stores are made of, and the product."""
    kept: list[Instruction] = []
    wanted, roots = {product}, set(stores)
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
