"""Whether one kernel may own whole rows, so that it can sweep over them more than once."""

from __future__ import annotations

from fusewright.ir.graph import ITEM_BYTES, ONE
from fusewright.ir.loop import Access, Load, LoopKernel, Store
from fusewright.plan.values import Values
from fusewright.schedule.coalesce import coalesce
from fusewright.schedule.held_columns import held_column
from fusewright.schedule.loops import choose
from fusewright.schedule.sweeps import sweeps

# A row of this many bytes per tensor stays in the registers of one block, or in a core's cache.
ROW_BYTES = 128 * 1024
# With more rows than this, each row has a block of its own even if it must be read again.
MANY_ROWS = 256
TRANSPOSED_BYTES = 2 << 20  # smaller outputs are written across rows, without a kernel of their own


def holds_rows(values: Values, kernel: LoopKernel) -> bool:
    """Whether a kernel of several sweeps may own whole rows: they are contiguous, and either short
    enough to stay close, or so many that reading them twice loses nothing."""
    outer = kernel.outer_numel.at(values.sizes)
    reduced = values.target.fused_reductions and _reads_convolution(values, kernel)
    many = outer >= MANY_ROWS and not reduced
    if not _along_rows(values, kernel):
        return False
    return many or _are_short(values, kernel) or _in_clusters(values, kernel, outer)


def _in_clusters(values: Values, kernel: LoopKernel, outer: int) -> bool:
    """Whether clusters hold the rows, and the blocks of all rows keep the GPU busy. Rows of several
    pieces, such as the channels of a batch norm, were not measured."""
    small = coalesce(kernel)
    if not values.target.clusters or len(small.inner) != 1 or sweeps(small).count == 1:
        return False
    found = choose(small, values.target, values.sizes)
    return found.cluster > 1 and outer * found.cluster >= 2 * values.target.sms


def holds_whole_columns(values: Values, kernel: LoopKernel) -> bool:
    """The same for columns that stay in registers, on targets that prefer to read memory once."""
    return values.target.online and held_column(coalesce(kernel), values.sizes) is not None


def keeps_rows(values: Values, kernel: LoopKernel) -> bool:
    """Whether rows stay close during all sweeps, so that the kernel reads them once."""
    return _along_rows(values, kernel) and _are_short(values, kernel)


def _are_short(values: Values, kernel: LoopKernel) -> bool:
    item_bytes = max((ITEM_BYTES[arg.dtype] for arg in kernel.arguments), default=4)
    return kernel.inner_numel.at(values.sizes) * item_bytes <= ROW_BYTES


def _along_rows(values: Values, kernel: LoopKernel) -> bool:
    """Whether the largest tensors that are read are contiguous along the rows."""
    first_inner = len(kernel.outer)
    widest = 0
    contiguous = True
    for item in kernel.body:
        if not isinstance(item, Load) or not any(s.factor for s in item.access.strides):
            continue
        size = _extent(kernel, item, values)
        if size < widest:
            continue
        along = [
            position
            for position, stride in enumerate(item.access.strides)
            if stride.factor and stride.at(values.sizes) == 1
        ]
        here = all(position >= first_inner for position in along)
        contiguous = here if size > widest else contiguous and here
        widest = size
    return contiguous and not (values.target.transposing and _mixes_rows(values, kernel))


def _reads_convolution(values: Values, kernel: LoopKernel) -> bool:
    """Whether a kernel reads the result of a convolution, which could do its first sweep."""
    read = {item.access.buffer for item in kernel.body if isinstance(item, Load)}
    return any(values.ends.get(name, name) in values.convolutions for name in read)


def _mixes_rows(values: Values, kernel: LoopKernel) -> bool:
    """Whether whole tensors are contiguous along different axes of a row, or large ones are written
    across rows. Then the sweeps are better separate kernels, the last one a transposition (H200, a
    batch norm's gradient of 128 channels of 16×28², written in channels-last: 31 µs)."""
    points = kernel.outer_numel.at(values.sizes) * kernel.inner_numel.at(values.sizes)
    along: set[int] = set()
    for item in kernel.body:
        if isinstance(item, Load | Store) and 2 * _extent(kernel, item, values) > points:
            large = isinstance(item, Store) and points * ITEM_BYTES[item.dtype] >= TRANSPOSED_BYTES
            first = 0 if large else len(kernel.outer)
            along |= {at for at in order_of(kernel, item.access) if at >= first}
    return len(along) > 1


def order_of(kernel: LoopKernel, access: Access) -> tuple[int, ...]:
    """The axes along which an access has neighbours in memory."""
    strides = zip(kernel.axes, access.strides, strict=True)
    return tuple(at for at, (axis, by) in enumerate(strides) if by == ONE and axis.size != ONE)


def _extent(kernel: LoopKernel, item: Load | Store, values: Values) -> int:
    total = 1
    for axis, stride in zip(kernel.axes, item.access.strides, strict=True):
        total *= axis.size.at(values.sizes) if stride.factor else 1
    return total
