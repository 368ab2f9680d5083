"""The axes of vectors, whether vectors are whole and aligned, and how wide they may be.

Kernels here are in coalesced form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fusewright.ir.graph import ITEM_BYTES, ONE, ZERO
from fusewright.ir.loop import Access, Load, LoopKernel, Store
from fusewright.schedule.sweeps import element_accesses, sweeps
from fusewright.schedule.transpose_tiles import TILED, reach, staged, transposed_axis

ROWS = ("row", "transpose_row", "scan")  # kinds whose lanes are along the last inner axis


def lanes_fit(kernel: LoopKernel, kind: str, lanes: int) -> bool:
    """Whether vectors of `lanes` elements are whole and, if pointers allow, aligned."""
    if lanes == 1:
        return True
    if lane_axis(kernel, kind) is None:
        return False
    alone = kind == "pointwise" and len(kernel.outer) == 1
    sizes = [kernel.axes[axis].size for axis in vector_axes(kernel, kind)]
    if not alone and any(size.is_static and size.factor % lanes for size in sizes):
        return False
    return all(_access_fits(access, axis, lanes) for access, axis in vectors(kernel, kind))


def vector_axes(kernel: LoopKernel, kind: str) -> tuple[int, ...]:
    """The axes along which vectors are read and written."""
    transposed = None
    if kind in TILED:
        within = kind == "transpose_column"
        transposed = len(kernel.axes) - 1 if within else transposed_axis(kernel)
    return tuple(axis for axis in (lane_axis(kernel, kind), transposed) if axis is not None)


def vectors(kernel: LoopKernel, kind: str) -> Iterator[tuple[Access, int]]:
    """Each access that moves whole vectors, with their axis."""
    axes = vector_axes(kernel, kind)
    across = {item.access for item in staged(kernel, kind)}
    for access in lane_accesses(kernel, kind):
        axis = axes[-1] if access in across else axes[0]
        if not _is_guarded(access, axis):
            yield access, axis


def _is_guarded(access: Access, axis: int) -> bool:
    """Whether lanes along an axis are read one by one, because some are inside and some are not."""
    return any(guard.steps[axis] != ZERO for guard in access.guards)


def _access_fits(access: Access, axis: int, lanes: int) -> bool:
    if access.strides[axis] == ZERO:
        return True
    others = [stride for at, stride in enumerate(access.strides) if at != axis]
    steps = [each for each in (*others, *access.offset) if each.is_static]
    return access.strides[axis] == ONE and all(each.factor % lanes == 0 for each in steps)


def lane_axis(kernel: LoopKernel, kind: str) -> int | None:
    """The position of the lane axis."""
    if kind in ROWS:
        return len(kernel.axes) - 1
    return len(kernel.outer) - 1 if kernel.outer else None


def lane_accesses(kernel: LoopKernel, kind: str) -> tuple[Access, ...]:
    """The accesses that move whole vectors."""
    return tuple(item.access for item in _lane_items(kernel, kind))


def _lane_items(kernel: LoopKernel, kind: str) -> tuple[Load | Store, ...]:
    if kind in ROWS:
        return element_accesses(kernel, sweeps(kernel))
    return tuple(item for item in kernel.body if isinstance(item, Load | Store))


def prefers_column(kernel: LoopKernel, sizes: Mapping[str, int]) -> bool:
    """Whether reducing down the columns is better, in a single sweep."""
    return sweeps(kernel).count == 1 and is_contiguous_in_columns(kernel, sizes)


def is_contiguous_in_columns(kernel: LoopKernel, sizes: Mapping[str, int]) -> bool:
    """Whether most of the bytes are contiguous along the last outer axis."""
    plan = sweeps(kernel)
    if not kernel.outer:
        return False
    row_bytes = column_bytes = 0
    for item in element_accesses(kernel, plan):
        moved = ITEM_BYTES[item.dtype] * reach(item.access, kernel, sizes)
        row_bytes += moved * (item.access.strides[-1] == ONE)
        column_bytes += moved * (item.access.strides[len(kernel.outer) - 1] == ONE)
    return column_bytes > row_bytes


def column_widths(kernel: LoopKernel) -> list[int]:
    """Vector widths for columns: eight bytes per thread instead of sixteen allow more threads
    (H200, 1024 × 8192 floats, two operands 33.7 instead of 38.1 µs, one 19.6 and 21.4; 16384 rows
    394.9 and 397.2)."""
    wide = list(widths(kernel, "column"))
    return wide[1:] if wide[0] > 2 else wide


def widths(kernel: LoopKernel, kind: str) -> Iterator[int]:
    """Vector widths to try: 16 bytes of the largest item, then half as many, and so on.

    If a load is guarded along the lanes: single elements. Then neighbouring threads of a warp read
    neighbours, while a vector per thread would be as many accesses, each over more cache lines.
    """
    axis = lane_axis(kernel, kind)
    if axis is not None and any(_is_guarded(each, axis) for each in lane_accesses(kernel, kind)):
        yield 1
        return
    moving = [
        ITEM_BYTES[item.dtype]
        for item in _lane_items(kernel, kind)
        if axis is None or item.access.strides[axis] != ZERO
    ]
    lanes = 16 // max(moving, default=16)
    while lanes >= 1:
        yield lanes
        lanes //= 2
