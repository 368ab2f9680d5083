"""Which accesses of a loop kernel go through shared memory, because they are strided along its
lanes.

Lanes run along the kernel's last axis. An access is *staged* if it is contiguous along another
axis, the *transposed* one, instead. In held columns ('transpose_column') lanes run along the last
outer axis, the last inner one is transposed, and stores alone are staged: they follow the last
sweep. Kernels here are in coalesced form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fusewright.ir.graph import ITEM_BYTES, ONE, ZERO
from fusewright.ir.loop import Access, Load, LoopKernel, Store
from fusewright.schedule.sweeps import element_accesses, sweeps

TILED = ("transpose", "transpose_row", "transpose_column")  # kinds that stage accesses
LEAST_SLOT = 4  # bytes: the width of a bank of shared memory
LEAST_TILED = 8  # floats of a sector: along a shorter axis, reads do not fill whole sectors anyway


def tiled_accesses(kernel: LoopKernel) -> tuple[Load | Store, ...]:
    """The loads and stores at every point."""
    if kernel.inner:
        return element_accesses(kernel, sweeps(kernel))
    return tuple(item for item in kernel.body if isinstance(item, Load | Store))


def transposed_axis(kernel: LoopKernel) -> int | None:
    """The axis along which most bytes are contiguous, of those that are strided along the lanes.

    In a kernel with reductions it is an inner axis or the last outer axis, which separates rows.
    """
    lane = len(kernel.axes) - 1
    axes = range(len(kernel.outer) - 1 if kernel.inner else 0, lane)
    weights = {
        axis: sum(
            ITEM_BYTES[item.dtype]
            for item in tiled_accesses(kernel)
            if _is_strided_along_lanes(item.access, lane, axis)
        )
        for axis in axes
        if axis >= 0
    }
    best = max(weights, key=lambda axis: weights[axis], default=None)
    return best if best is not None and weights[best] else None


def staged(kernel: LoopKernel, kind: str = "transpose") -> tuple[Load | Store, ...]:
    """The accesses that go through shared memory, in the body's order."""
    if kind == "transpose_column":
        return staged_stores(kernel)
    transposed = transposed_axis(kernel) if kind in TILED else None
    if transposed is None:
        return ()
    lane = len(kernel.axes) - 1
    return tuple(
        item
        for item in tiled_accesses(kernel)
        if _is_strided_along_lanes(item.access, lane, transposed)
    )


def staged_stores(kernel: LoopKernel) -> tuple[Store, ...]:
    """The stores of held columns that go through shared memory."""
    lane, transposed = len(kernel.outer) - 1, len(kernel.axes) - 1
    if not (kernel.outer and kernel.inner):
        return ()
    stores = sweeps(kernel).inner_stores
    return tuple(x for x in stores if _is_strided_along_lanes(x.access, lane, transposed))


def _is_strided_along_lanes(access: Access, lane: int, axis: int) -> bool:
    across = access.strides[axis] == ONE and access.strides[lane] not in (ZERO, ONE)
    return across and not access.guards  # a tile is read whole


def slot_bytes(found: Collection[Load | Store]) -> int:
    return max((LEAST_SLOT, *(ITEM_BYTES[item.dtype] for item in found)))


def tile_count(found: Collection[Load | Store]) -> int:
    """Tiles in shared memory: a thread stores its results where it read its operands."""
    loads = sum(isinstance(item, Load) for item in found)
    return max(loads, len(found) - loads)


def tile_bytes(kernel: LoopKernel, tile: int) -> int:
    """Shared memory of a block; each row of a tile is padded by one slot."""
    found = staged(kernel)
    return tile_count(found) * tile * (tile + 1) * slot_bytes(found)


def column_tile_bytes(kernel: LoopKernel, columns: int, elements: int) -> int:
    """Shared memory for the results of a block of held columns. The pitch is odd."""
    found = staged_stores(kernel)
    return tile_count(found) * columns * (elements | 1) * slot_bytes(found)


def mixes_layouts(kernel: LoopKernel, sizes: Mapping[str, int]) -> bool:
    """Whether some whole tensors are contiguous along the lanes and others are strided: one of the
    two would move one element per cache line."""
    transposed, lane = transposed_axis(kernel), len(kernel.axes) - 1
    if (
        transposed is None
        or min(kernel.axes[at].size.at(sizes) for at in (transposed, lane)) < LEAST_TILED
    ):
        return False
    points = kernel.outer_numel.at(sizes) * kernel.inner_numel.at(sizes)
    whole = [i for i in tiled_accesses(kernel) if 2 * reach(i.access, kernel, sizes) > points]
    across = staged(kernel)
    return any(i in across for i in whole) and any(i.access.strides[lane] == ONE for i in whole)


def stages_stores(kernel: LoopKernel, sizes: Mapping[str, int]) -> bool:
    """Whether held columns write some whole tensor along their inner axis: each access of a warp
    would touch as many sectors as it has threads."""
    if not kernel.inner or kernel.axes[-1].size.at(sizes) < LEAST_TILED:
        return False
    points = kernel.outer_numel.at(sizes) * kernel.inner_numel.at(sizes)
    return any(2 * reach(x.access, kernel, sizes) > points for x in staged_stores(kernel))


def reach(access: Access, kernel: LoopKernel, sizes: Mapping[str, int]) -> int:
    """How many different elements the access touches."""
    total = 1
    for axis, stride in zip(kernel.axes, access.strides, strict=True):
        total *= axis.size.at(sizes) if stride.factor else 1
    return total
