"""The same loop kernel over as few axes as possible.

Axes of size one are dropped, axes are sorted by their order in memory (the outputs' first), and
neighbours are merged if every access walks them as one. A kernel that reduces keeps at least one
inner axis, and one that scans keeps the order of its inner axes. The result computes the same
values; only the order in which a reduction adds may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cmp_to_key

from fusewright.ir.graph import ONE, ZERO, Dim
from fusewright.ir.loop import (
    Axis,
    Index,
    Instruction,
    Load,
    LoopKernel,
    Reduce,
    Scan,
    Store,
    scans,
)

Strides = tuple[Dim, ...]
SHORT, LONG = 4, 16  # elements of a run on the host
# One axis, with the strides of every access and index along it.
Column = tuple[Axis, tuple[Dim, ...]]


def coalesce(kernel: LoopKernel) -> LoopKernel:
    """Drop, reorder and merge axes."""
    return _over_fewer(kernel, _priority(kernel))


def merge(kernel: LoopKernel) -> LoopKernel:
    """Drop and merge axes; keep their order."""
    return _over_fewer(kernel, [])


def with_long_lanes(kernel: LoopKernel) -> LoopKernel:
    """Swap the last two axes if the last is so short that starting a run takes longer than the run,
    and steps along the other are as short (gradient of max pooling, 3 by 2 of 4 × 64 × 112² floats,
    two Neoverse-N1 while other jobs ran: 36 → 9 ms)."""
    sizes = [axis.size for axis in kernel.outer[-2:]]
    if kernel.inner or len(sizes) < 2 or not all(size.is_static for size in sizes):
        return kernel
    steps = [each[-2] for item in kernel.body for each in moves_of(item)[:1]]
    near = all(step.is_static and abs(step.factor) <= SHORT for step in steps)
    if not near or sizes[1].factor > SHORT or sizes[0].factor < LONG:
        return kernel

    def permuted(strides: Strides) -> Strides:
        return (*strides[:-2], strides[-1], strides[-2])

    outer = (*kernel.outer[:-2], kernel.outer[-1], kernel.outer[-2])
    return replace(kernel, outer=outer, body=restrided(kernel.body, permuted))


def _over_fewer(kernel: LoopKernel, order: list[int]) -> LoopKernel:
    table = [strides for item in kernel.body for strides in moves_of(item)]
    columns: list[Column] = [
        (axis, tuple(strides[position] for strides in table))
        for position, axis in enumerate(kernel.axes)
    ]
    n_outer = len(kernel.outer)
    outer = _simplify(columns[:n_outer], order)
    inner = _simplify(columns[n_outer:], [] if scans(kernel) else order)
    if not inner and any(isinstance(item, Reduce | Scan) for item in kernel.body):
        inner = [(Axis("once", ONE), tuple(ZERO for _ in table))]
    return replace(
        kernel,
        outer=tuple(axis for axis, _ in outer),
        inner=tuple(axis for axis, _ in inner),
        body=_rebuilt(kernel.body, outer + inner),
    )


def moves_of(item: Instruction) -> tuple[Strides, ...]:
    """The steps per axis of everything that moves in an instruction: address, guards, index."""
    match item:
        case Load() | Store():
            return item.access.moves
        case Index():
            return (item.steps,)
    return ()


def _priority(kernel: LoopKernel) -> list[int]:
    """Positions in the stride table, in the order in which they decide: stores, then loads."""
    stores, loads, at = list[int](), list[int](), 0
    for item in kernel.body:
        stores += [at] * isinstance(item, Store)
        loads += [at] * isinstance(item, Load)
        at += len(moves_of(item))
    return stores + loads


def _simplify(columns: list[Column], order: list[int]) -> list[Column]:
    if any(axis.size == ZERO for axis, _ in columns):
        # Nothing runs: one axis that still says which accesses move.
        moves = [any(strides[at].factor for _, strides in columns) for at in _range(columns)]
        return [(Axis("empty", ZERO), tuple(ONE if each else ZERO for each in moves))]
    kept = [column for column in columns if column[0].size != ONE]
    merged: list[Column] = []
    for column in sorted(kept, key=cmp_to_key(_memory_order(order))):
        if merged and _continues(merged[-1], column):
            merged[-1] = _merged(merged[-1], column)
        else:
            merged.append(column)
    return merged


def _range(columns: list[Column]) -> range:
    return range(len(columns[0][1]))


def _memory_order(order: list[int]) -> Callable[[Column, Column], int]:
    """Larger strides first, by the first access that distinguishes two axes."""

    def compare(a: Column, b: Column) -> int:
        for at in order:
            left, right = a[1][at], b[1][at]
            if left.factor and right.factor and left != right:
                return -1 if _size_key(left) > _size_key(right) else 1
        return 0

    return compare


def _size_key(stride: Dim) -> tuple[int, int]:
    """A stride with more symbols counts as the larger one."""
    return len(stride.symbols), abs(stride.factor)


def _continues(outer: Column, inner: Column) -> bool:
    size = inner[0].size
    return all(a == b * size for a, b in zip(outer[1], inner[1], strict=True))


def _merged(outer: Column, inner: Column) -> Column:
    axis = Axis(f"{outer[0].name}_{inner[0].name}", outer[0].size * inner[0].size)
    return axis, inner[1]


def _rebuilt(body: tuple[Instruction, ...], columns: list[Column]) -> tuple[Instruction, ...]:
    rebuilt: list[Instruction] = []
    at = 0
    for item in body:
        count = len(moves_of(item))
        moves = [tuple(column[1][row] for column in columns) for row in range(at, at + count)]
        at += count
        rebuilt.append(with_moves(item, tuple(moves)))
    return tuple(rebuilt)


def split_axis(kernel: LoopKernel, at: int, inner: Dim) -> LoopKernel | None:
    """The same kernel with an axis split in two, the second of size `inner`, if possible."""
    axis, n_outer = kernel.axes[at], len(kernel.outer)
    outer = axis.size.divided_by(inner)
    if outer is None:
        return None
    parts = (Axis(f"{axis.name}_0", outer), Axis(f"{axis.name}_1", inner))
    axes = (*kernel.axes[:at], *parts, *kernel.axes[at + 1 :])
    n_outer += at < n_outer

    def split(strides: Strides) -> Strides:
        return (*strides[:at], strides[at] * inner, strides[at], *strides[at + 1 :])

    body = restrided(kernel.body, split)
    return replace(kernel, outer=axes[:n_outer], inner=axes[n_outer:], body=body)


def restrided(
    body: tuple[Instruction, ...], change: Callable[[Strides], Strides]
) -> tuple[Instruction, ...]:
    """The same body with other strides for every access, guard and index."""
    return tuple(with_moves(item, tuple(map(change, moves_of(item)))) for item in body)


def with_moves(item: Instruction, moves: tuple[Strides, ...]) -> Instruction:
    match item:
        case Load() | Store():
            return replace(item, access=item.access.moved(moves))
        case Index():
            return replace(item, steps=moves[0])
    return item
