"""Whether the indices and offsets of a loop kernel fit into 32 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusewright.ir.graph import Dim
from fusewright.ir.loop import Index, Load, LoopKernel, Store

# Loops may step past the end by one step of a block before they check.
NARROW_LIMIT = 2**31 - 2**20
GROWTH = 16  # times the example's size: larger inputs are not expected


def extents(kernel: LoopKernel) -> list[tuple[Dim, ...]]:
    """For each index and offset, the terms whose sum bounds it."""
    found: list[tuple[Dim, ...]] = [(kernel.outer_numel,), (kernel.inner_numel,)]
    for item in kernel.body:
        match item:
            case Load() | Store():
                found.append(_extent(kernel, item.access.strides, item.access.offset))
                for guard in item.access.guards:
                    ends = (Dim(guard.start), Dim(guard.size))
                    found.append(_extent(kernel, guard.steps, ends))
            case Index():
                found.append(_extent(kernel, item.steps, item.start))
    return found


def _extent(kernel: LoopKernel, strides: Iterable[Dim], start: Iterable[Dim]) -> tuple[Dim, ...]:
    sizes = (axis.size for axis in kernel.axes)
    moves = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    return tuple(Dim(abs(term.factor), term.symbols) for term in (*moves, *start))


def may_be_wide(kernel: LoopKernel, sizes: Mapping[str, int]) -> bool:
    """Whether 32 bits may be too few for a batch similar to the example's."""
    most = max(sum(term.at(sizes) for term in terms) for terms in extents(kernel))
    return most * GROWTH >= NARROW_LIMIT
