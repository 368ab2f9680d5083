"""Sums over the elements of results, made chunk by chunk.

Results may have gigabytes. Only one chunk at a time is converted to float64. Figures of several
parts of a tensor can be joined, so the truth may come in parts as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of one chunk; a comparison holds about eight float64 copies of it.
_CHUNK = {"cuda": 1 << 25, "cpu": 1 << 21}

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Sums:
    """How far one run is off, over some elements.

    `beyond` counts the elements that are off by more than rounding, `differing` all that are not
    equal. `misplaced` says that NaN or an infinity is where neither eager nor the truth has it.
    """

    squares: float = 0.0
    largest: float = 0.0
    beyond: float = 0.0
    differing: float = 0.0
    misplaced: bool = False

    def joined(self, other: Sums) -> Sums:
        return Sums(
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.beyond + other.beyond,
            self.differing + other.differing,
            self.misplaced or other.misplaced,
        )


@dataclass(frozen=True)
class Figures:
    """The truth over some elements (their number, their squares, the largest) and each run's sums.

    A run without a tensor of the right shape has None.
    """

    count: int
    squares: float
    peak: float
    runs: tuple[Sums | None, ...]

    def joined(self, other: Figures) -> Figures:
        both = zip(self.runs, other.runs, strict=True)
        return Figures(
            self.count + other.count,
            self.squares + other.squares,
            max(self.peak, other.peak),
            tuple(a.joined(b) if a and b else None for a, b in both),
        )


def measure(true: Tensor, eager: Tensor, runs: Sequence[object], coarse: float) -> Figures:
    """The figures of these runs; a deviation of more than `coarse` is more than rounding."""
    fitting = [_fitting(each, eager) for each in runs]
    total = Figures(0, 0.0, 0.0, tuple(None if each is None else Sums() for each in fitting))
    for index in chunks(eager.shape, _CHUNK.get(eager.device.type, _CHUNK["cpu"])):
        parts = [None if each is None else each[index] for each in fitting]
        total = total.joined(_measured(true[index], eager[index], parts, coarse))
    return total


def peak_of(value: Tensor) -> float:
    """The largest finite magnitude."""
    found = 0.0
    for index in chunks(value.shape, _CHUNK.get(value.device.type, _CHUNK["cpu"])):
        part = wide(value[index])
        if part.numel():
            found = max(found, _summed(part)[1])
    return found


def root_mean_square(value: object) -> float:
    """The root mean square of the finite elements; 0 if this is not a floating tensor."""
    if not isinstance(value, Tensor) or not value.numel() or not is_inexact(value):
        return 0.0
    squares = count = 0.0
    for index in chunks(value.shape, _CHUNK.get(value.device.type, _CHUNK["cpu"])):
        part = wide(value[index])
        squares += _summed(part)[0]
        count += part.numel()
    return math.sqrt(squares / count)


def same_values(left: Tensor, right: Tensor) -> bool:
    """Whether all elements are equal; NaN is equal to NaN."""
    if left.shape != right.shape:
        return False
    for index in chunks(left.shape, _CHUNK.get(left.device.type, _CHUNK["cpu"])):
        mine, theirs = left[index], right.detach()[index]
        equal = torch.equal(mine, theirs)
        if not equal and not bool(torch.isclose(mine, theirs, 0, 0, equal_nan=True).all()):
            return False
    return True


def chunks(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Indices that cover a tensor in parts of at most `most` elements, without copies."""
    total = math.prod(shape)
    if total <= most:
        yield ()
        return
    row = total // shape[0]
    rows = max(most // row, 1)
    for start in range(0, shape[0], rows):
        part = slice(start, start + rows)
        for rest in chunks(shape[1:], most):
            yield (part, *rest)


def is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def wide(value: Tensor) -> Tensor:
    """The values in float64; complex numbers as pairs."""
    value = value.detach()
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj().to(torch.complex128))
    return value.to(torch.float64)


def _fitting(value: object, eager: Tensor) -> Tensor | None:
    fits = isinstance(value, Tensor) and value.shape == eager.shape
    return value.detach() if fits and isinstance(value, Tensor) else None


def _measured(true: Tensor, eager: Tensor, runs: Sequence[Tensor | None], coarse: float) -> Figures:
    """The figures of one chunk."""
    exact = wide(true)
    if not exact.numel():
        return Figures(0, 0.0, 0.0, tuple(None if each is None else Sums() for each in runs))
    sums = tuple(
        None if each is None else _off(each.to(eager.dtype), true, exact, eager, coarse)
        for each in runs
    )
    return Figures(exact.numel(), *_summed(exact), sums)


def _off(value: Tensor, true: Tensor, exact: Tensor, eager: Tensor, coarse: float) -> Sums:
    mine = wide(value)
    off, misplaced = mine - exact, False
    if not math.isfinite(float(off.norm())):
        kinds = _kinds(mine)
        misplaced = bool(((kinds != _kinds(wide(eager))) & (kinds != _kinds(exact))).any())
        off = torch.where(mine.isfinite() & exact.isfinite(), off, 0.0)
    squares, largest = _summed(off)
    beyond = float((off.abs() > coarse).sum()) if largest > coarse else 0.0
    # float64 cannot represent every integer
    differing = 0.0 if is_inexact(eager) else float((value != true).sum())
    return Sums(squares, largest, beyond, differing, misplaced)


def _summed(part: Tensor) -> tuple[float, float]:
    """The sum of squares and the largest magnitude of the finite elements."""
    norm = float(part.norm())
    if not math.isfinite(norm):  # seldom; it takes as long as all the rest
        part = torch.where(part.isfinite(), part, 0.0)
        norm = float(part.norm())
    low, high = part.aminmax()
    return norm**2, max(-float(low), float(high), 0.0)


def _kinds(value: Tensor) -> Tensor:
    """0 for a finite element, 1 for NaN, 2 and 3 for the two infinities."""
    kinds = value.isnan().to(torch.int8)
    return kinds + 2 * value.isposinf().to(torch.int8) + 3 * value.isneginf().to(torch.int8)
