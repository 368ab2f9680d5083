"""A bound for each row and each channel: a small part that is wrong does not hide in the whole.

The error of a slice is ‖x − truth‖ / ‖truth‖ over its elements. It may be some times the largest
one that eager has in any slice, plus rounding at the scale of the whole tensor. Where a right run
is off by more in this very slice, that is the measure: terms that cancel leave zero, or rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusewright.verify.compare import Check
from fusewright.verify.figures import is_inexact, wide

_OF_EAGERS_WORST = 16.0
_OF_THE_WHOLE = 2.0
_ULPS = 4
_MOST_ELEMENTS = 1 << 24


def check_slices(
    name: str,
    ours: Tensor,
    eager: Tensor,
    truth: Tensor | None,
    others: Sequence[object] = (),
    allowed: float = 0.0,
) -> Check | None:
    """The worst slice along any dimension; None if there are no slices to compare. Without float64,
    a slice may be somewhat further off than is `allowed` for the whole."""
    if not is_inexact(eager) or eager.dim() < 2 or not 0 < eager.numel() <= _MOST_ELEMENTS:
        return None
    exact = wide(eager if truth is None else truth)
    ulp = torch.finfo(eager.dtype).eps
    runs = [
        wide(each)
        for each in (ours, eager, *others)
        if isinstance(each, Tensor) and each.shape == eager.shape
    ]
    least = _ULPS * ulp
    if truth is None:
        least = max(math.sqrt(ulp), _OF_THE_WHOLE * allowed / _OF_EAGERS_WORST)
    # Squares are taken once and summed along each dimension.
    squares = [_squares(exact), *(_squares(each - exact) for each in runs)]
    worst: Check | None = None
    for dim in range(eager.dim()):
        if eager.shape[dim] > 1:
            sizes = [_sizes(each, dim) for each in squares]
            found = _along(name, dim, sizes[1], sizes[2:], sizes[0], least, ulp)
            if worst is None or found.badness > worst.badness:
                worst = found
    return worst


def _along(
    name: str,
    dim: int,
    mine: Tensor,
    right: Sequence[Tensor],
    truth: Tensor,
    least: float,
    ulp: float,
) -> Check:
    """The worst slice along a dimension, from the norms of the slices and of the deviations."""
    shares = [_largest_share(each, truth) for each in right]
    share = _OF_EAGERS_WORST * (max(shares) + least)
    rounding = _ULPS * ulp * float(truth.square().mean().sqrt())
    allowed = share * truth + rounding
    for each in right:
        allowed = torch.maximum(allowed, _OF_EAGERS_WORST * each)
    beyond = mine > allowed
    index = int((mine / allowed.clamp_min(1e-300)).argmax())
    size = float(truth[index]) or rounding or 1.0
    return Check(
        f"{name}, slice {index} of dimension {dim}",
        float(mine[index]) / size,
        shares[0],
        float(allowed[index]) / size,
        not bool(beyond.any()),
        "" if not bool(beyond.any()) else "this part is wrong, the rest is not",
        spread=float(beyond.double().mean()),
    )


def _squares(values: Tensor) -> Tensor:
    """The squares of the elements that are finite."""
    found = values.square()
    if math.isfinite(float(found.sum())):
        return found
    return torch.where(values.isfinite(), found, 0.0)


def _sizes(squares: Tensor, dim: int) -> Tensor:
    """The norm of each slice."""
    others = [each for each in range(squares.dim()) if each != dim]
    return squares.sum(dim=others).sqrt()


def _largest_share(off: Tensor, truth: Tensor) -> float:
    """The largest error of a slice that is not zero."""
    kept = truth > 0
    return float((off[kept] / truth[kept]).max()) if bool(kept.any()) else 0.0
