"""Index arithmetic for fusion: the element of each tensor at a point of the iteration space.

A kernel iterates over a row-major list of axes. A `DimIndex` says how one dimension of a tensor is
indexed: its axes are the digits of a mixed-radix number, which a slice scales and shifts. Views are
followed backwards, from the shape that is read to the shape that is stored. If a view cuts an axis
in two, `NeedSplitError` asks the caller to split that axis and start again, so an address never
contains a division.
"""

from __future__ import annotations

from typing import NamedTuple

from fusewright.ir.graph import ONE, ZERO, Dim, Node, TensorSpec, contiguous_strides, product
from fusewright.ir.loop import Access, Guard
from fusewright.rewrite.padding import pad_parts
from fusewright.rewrite.views import permute_order, slice_parts


class NotFusibleError(Exception):
    """The values cannot be in one kernel; the reason is for the debugging log.

    `culprit` names the view that index arithmetic cannot follow, if that is the reason. Its source
    must then be in memory, and PyTorch takes the view.
    """

    def __init__(self, reason: str, culprit: str | None = None) -> None:
        super().__init__(reason)
        self.culprit = culprit


class NeedSplitError(Exception):
    """Axis `position` must become two axes, the inner one of size `inner`."""

    def __init__(self, position: int, inner: Dim) -> None:
        super().__init__(f"axis {position} by {inner}")
        self.position = position
        self.inner = inner


class DimIndex(NamedTuple):
    """start + step · (the mixed-radix number whose digits are `axes`).

    `loose`: it may be outside the dimension, because padding was followed; a value computed there
    is not used.
    """

    axes: tuple[int, ...] = ()
    start: int = 0
    step: int = 1
    loose: bool = False

    @property
    def is_pure(self) -> bool:
        return self.start == 0 and self.step == 1 and not self.loose


ElementIndex = tuple[DimIndex, ...]


def group(shape: tuple[Dim, ...], axes: tuple[int, ...], sizes: tuple[Dim, ...]) -> ElementIndex:
    """Distribute row-major `axes` over the dimensions of `shape`, whose sizes are their
    products."""
    result: list[DimIndex] = []
    rest = list(axes)
    for size in reversed(shape):
        taken: list[int] = []
        missing = size
        while missing != ONE:
            if not rest:
                raise NotFusibleError(f"shape {shape} does not fill the axes")
            axis = rest.pop()
            missing = _filled(missing, axis, sizes[axis])
            taken.append(axis)
        result.append(DimIndex(tuple(reversed(taken))))
    if rest:
        raise NotFusibleError(f"shape {shape} leaves axes over")
    return tuple(reversed(result))


def _filled(missing: Dim, axis: int, size: Dim) -> Dim:
    """The factor of a dimension that remains once `axis` is one of its digits."""
    if missing == size:
        return ONE
    quotient = missing.divided_by(size)
    if quotient is None or ZERO in (missing, size):
        if ZERO in (missing, size) or size.divided_by(missing) is None:
            raise NotFusibleError(f"sizes {missing} and {size} have no common split")
        raise NeedSplitError(axis, missing)
    return quotient


def through_broadcast(index: ElementIndex, shape: tuple[Dim, ...]) -> ElementIndex:
    """The index of an operand of `shape` that is broadcast, right-aligned, to the read shape."""
    kept = index[len(index) - len(shape) :]
    return tuple(
        DimIndex() if size == ONE else each for each, size in zip(kept, shape, strict=True)
    )


def through_view(
    node: Node, held: TensorSpec, index: ElementIndex, sizes: tuple[Dim, ...]
) -> ElementIndex:
    """The index into a canonical view's source, given the index into its result."""
    match node.op:
        case "aten.permute.default":
            order = permute_order(node)
            return tuple(index[order.index(position)] for position in range(len(order)))
        case "aten.expand.default":
            return through_broadcast(index, held.shape)
        case "aten.slice.Tensor":
            position, start, step = slice_parts(node)
            old = index[position]
            new = old._replace(start=start + step * old.start, step=step * old.step)
            return (*index[:position], new, *index[position + 1 :])
        case "aten.view.default":
            assert node.spec is not None
            return _through_reshape(node.spec.shape, held.shape, index, sizes)
    raise NotFusibleError(f"{node.op} is not a view we follow")


def through_pad(node: Node, index: ElementIndex) -> ElementIndex:
    """The index into the padded tensor, which may be outside it."""
    return tuple(
        each._replace(start=each.start - before, loose=each.loose or (before, after) != (0, 0))
        for each, (before, after) in zip(index, pad_parts(node), strict=True)
    )


def _through_reshape(
    read: tuple[Dim, ...], held: tuple[Dim, ...], index: ElementIndex, sizes: tuple[Dim, ...]
) -> ElementIndex:
    """Regroup digits; dimensions that the view does not change keep even a sliced index."""
    if ZERO in read:
        raise NotFusibleError("an empty tensor is viewed as another shape")
    result: list[DimIndex] = []
    rest = [each for each, size in zip(index, read, strict=True) if size != ONE]
    rest_sizes = [size for size in read if size != ONE]
    for size in reversed(held):
        if size == ONE:
            result.append(DimIndex())
            continue
        if rest and rest_sizes[-1] == size:
            result.append(rest.pop())
            rest_sizes.pop()
            continue
        digits = _take(size, rest, rest_sizes, sizes)
        result.append(DimIndex(digits))
    return tuple(reversed(result))


def _take(
    size: Dim, rest: list[DimIndex], rest_sizes: list[Dim], sizes: tuple[Dim, ...]
) -> tuple[int, ...]:
    """Digits for one stored dimension, taken from the end of the dimensions that are read."""
    digits: list[int] = []
    missing = size
    while missing != ONE:
        if not rest or not rest[-1].is_pure:
            raise NotFusibleError("a sliced dimension is viewed as another shape")
        axes = list(rest.pop().axes)
        whole = rest_sizes.pop()
        while axes and missing != ONE:
            axis = axes.pop()
            missing = _filled(missing, axis, sizes[axis])
            digits.append(axis)
        if axes:
            left = product(tuple(sizes[axis] for axis in axes))
            rest.append(DimIndex(tuple(axes)))
            rest_sizes.append(left)
        elif missing != ONE and whole == ONE:
            raise NotFusibleError("a broadcast dimension is viewed as another shape")
    return tuple(reversed(digits))


def access(buffer: str, spec: TensorSpec, index: ElementIndex, sizes: tuple[Dim, ...]) -> Access:
    """Strides per axis and the offset, in elements."""
    strides = [ZERO] * len(sizes)
    offset: list[Dim] = []
    for each, stride in zip(index, spec.strides, strict=True):
        if each.start:
            offset.append(stride * each.start)
        running = stride * each.step
        for axis in reversed(each.axes):
            if strides[axis] != ZERO:
                raise NotFusibleError("one axis walks along two dimensions of a tensor")
            strides[axis] = running
            running = running * sizes[axis]
    return Access(buffer, tuple(strides), tuple(offset), guards(spec.shape, index, sizes))


def guards(
    shape: tuple[Dim, ...], index: ElementIndex, sizes: tuple[Dim, ...]
) -> tuple[Guard, ...]:
    """The conditions for an index to be inside a shape, without those that always hold."""
    found: dict[Guard, None] = {}
    for each, size in zip(index, shape, strict=True):
        if not each.loose:
            continue
        steps, running = [ZERO] * len(sizes), Dim(each.step)
        for axis in reversed(each.axes):
            steps[axis] = running
            running = running * sizes[axis]
        if not (size.is_static and running.is_static):
            raise NotFusibleError("a dimension of no fixed size is padded")
        last = each.start + running.factor - each.step
        if each.start < 0 or last >= size.factor:
            found[Guard(tuple(steps), each.start, size.factor)] = None
    return tuple(found)


def dense_strides(shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The given strides if they fill memory without gaps or overlap; otherwise row-major ones."""
    if ZERO in shape:
        return contiguous_strides(shape)
    open_dims = [position for position, size in enumerate(shape) if size != ONE]
    running = ONE
    while open_dims:
        found = next((p for p in reversed(open_dims) if strides[p] == running), None)
        if found is None:
            return contiguous_strides(shape)
        open_dims.remove(found)
        running = running * shape[found]
    return strides
