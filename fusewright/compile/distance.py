"""How far two runs of a model are apart, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# How far a result may be off, relative to its norm, before a float64 run is asked. Convolutions may
# round to TF32, and a network makes that larger.
_DOUBTFUL = {
    torch.float64: 1e-6,
    torch.complex128: 1e-6,
    torch.float32: 1e-2,
    torch.complex64: 1e-2,
}
_IN_16_BITS = 1e-1
# Our error may be so many times eager's, which may be small by luck.
_OF_EAGER = 8.0
# Without a float64 run: gradients can be all rounding, as that of a bias before a batch norm.
_WRONG_OUTPUT, _WRONG_GRADIENT = 0.25, 2.0
# Integers and booleans come from comparisons, which rounding may decide.
_OTHER_CHOICES, _FEWEST_CHOICES = 0.1, 20


@dataclass(frozen=True)
class Limits:
    """`in_16_bits`: autocast computes in 16 bits, whatever the dtypes of the results are."""

    in_16_bits: bool = False

    def doubtful(self, dtype: torch.dtype) -> float:
        return _IN_16_BITS if self.in_16_bits else _DOUBTFUL.get(dtype, _IN_16_BITS)


# Whether a result of this name, ours and eager's, that is off by so much may still be right.
Excuse = Callable[[str, Tensor, Tensor, float], bool]


def difference(
    ours: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    limits: Limits,
    excuse: Excuse = lambda name, ours, eager, off: False,
) -> str:
    """The first result that is not eager's, in words. Empty if all are."""
    for name in {**eager, **ours}:
        one, other = ours.get(name), eager.get(name)
        if one is None or other is None:
            return f"{'eager' if one is None else 'ours'} alone gives the {name}"
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            said = f"{other.dtype}{list(other.shape)}"
            return f"the {name} is {one.dtype}{list(one.shape)}, not {said}"
        off = _off(one, other)
        if off <= limits.doubtful(one.dtype) or _is_rounding(one, other, eager.values()):
            continue
        if not excuse(name, one, other, off):
            return f"the {name} is off by {off:.1e}"
    return ""


def is_small(name: str, ours: Tensor, eager: Tensor, off: float) -> bool:
    """The excuse where there is no float64 run."""
    return off <= (_WRONG_GRADIENT if name.startswith("gradient") else _WRONG_OUTPUT)


def by_truth(truth: Mapping[str, Tensor], limits: Limits) -> Excuse:
    """The excuse that our error is like eager's. `truth` are the results of a float64 run."""

    def is_like_eagers(name: str, ours: Tensor, eager: Tensor, off: float) -> bool:
        exact = truth.get(name)
        if exact is None or exact.shape != ours.shape or exact.dtype is eager.dtype:
            return is_small(name, ours, eager, off)
        room = limits.doubtful(ours.dtype) * _norm(exact)
        return _distance(ours, exact) <= _OF_EAGER * _distance(eager, exact) + room

    return is_like_eagers


def _off(one: Tensor, other: Tensor) -> float:
    """The distance relative to the second one's norm. For integers, the share that differs."""
    if not one.numel() or one is other:
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        share = float((one != other).double().mean())
        return share if share > _OTHER_CHOICES and one.numel() >= _FEWEST_CHOICES else 0.0
    if _has_other_gaps(one, other):
        return float("inf")
    distance, norm = _distance(one, other), _norm(other)
    return distance / norm if norm else distance


def _is_rounding(one: Tensor, other: Tensor, results: Iterable[Tensor]) -> bool:
    """Whether the difference is nothing beside the largest of the results. The gradient of a bias
    before a batch norm is zero but for such differences."""
    if not one.is_floating_point() or _has_other_gaps(one, other):
        return False
    apart = _distance(one, other) / math.sqrt(one.numel())
    largest = max(map(_mean_size, results))
    return apart <= 16 * torch.finfo(one.dtype).eps * largest


def _mean_size(tensor: Tensor) -> float:
    """The root of the mean square."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return _norm(tensor) / math.sqrt(tensor.numel())


def _has_other_gaps(one: Tensor, other: Tensor) -> bool:
    """Whether infinities and NaN are at other places; a few may be, where a sum overflows."""
    one, other = _known(one), _known(other)
    return float((one.isfinite() != other.isfinite()).double().mean()) > 0.01


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = _known(one), _known(other)
    wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    return _norm(one.to(wide) - other.to(wide))


def _norm(tensor: Tensor) -> float:
    """Over the finite elements."""
    tensor = _known(tensor)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    held = torch.where(tensor.isfinite(), tensor, 0).to(wide)
    exact = torch.complex128 if held.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(held, dtype=exact))


def _known(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that has operators. float8 has hardly any."""
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.float() if is_float8 else tensor
