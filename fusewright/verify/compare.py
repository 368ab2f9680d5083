"""One result against the true one: how far it is off, beside how far eager PyTorch is off.

`truth` is the float64 run of the same model. A figure is ‖x − truth‖ / ‖truth‖, taken in float64
over the values that are finite. Where there is no true run to be had, eager stands in for it and
half of the data type's digits must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_ULPS = 4
_OF_EAGER = 2.0
# Eager itself has no digit right: the true value is zero but for rounding, as is the gradient of
# a bias that a batch norm follows. Such a result is measured by the size of its neighbours.
_NOISE = 0.5
_NOISE_ULPS = 32


@dataclass(frozen=True)
class Check:
    """One compared result; `allowed` is the largest error that is accepted."""

    name: str
    error: float
    eager_error: float
    allowed: float
    ok: bool
    note: str = ""

    @property
    def badness(self) -> tuple[bool, float]:
        """Orders checks of the same name: failed ones last, then by their share of the allowed."""
        return (not self.ok, self.error / self.allowed if self.allowed else self.error)


@dataclass(frozen=True)
class Triple:
    """The same result three times; `truth` is None where no float64 run can be had.

    `usual_rms` is the root mean square of the largest result of the same kind.
    """

    ours: object
    eager: object
    truth: object
    usual_rms: float


def compare(name: str, triple: Triple) -> Check:
    """Check one result: a tensor, an absent gradient or a plain value."""
    ours, eager = triple.ours, triple.eager
    if isinstance(eager, Tensor) and isinstance(ours, Tensor):
        return _compare_tensors(name, ours, eager, triple)
    if isinstance(eager, Tensor):
        return _failed(name, "missing: eager gives a tensor")
    if isinstance(ours, Tensor):
        # Eager leaves an unused parameter without gradient; zeros say the same.
        return _exact(name, not bool(ours.any()), "eager gives none here")
    return _exact(name, ours == eager, f"{ours!r}, eager gives {eager!r}")


def root_mean_square(value: object) -> float:
    """Of the finite elements; 0 for what is no floating tensor."""
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    wide = _wide(value)
    return _norm(wide, wide.isfinite()) / math.sqrt(wide.numel())


def _compare_tensors(name: str, ours: Tensor, eager: Tensor, triple: Triple) -> Check:
    if ours.shape != eager.shape:
        return _failed(name, f"shape {tuple(ours.shape)}, eager gives {tuple(eager.shape)}")
    if ours.dtype != eager.dtype:
        return _failed(name, f"{ours.dtype}, eager gives {eager.dtype}")
    if ours.device != eager.device:
        return _failed(name, f"on {ours.device}, eager gives it on {eager.device}")
    truth = triple.truth if isinstance(triple.truth, Tensor) else None
    if truth is not None and truth.shape != eager.shape:
        truth = None
    if eager.dtype in (torch.float64, torch.complex128):
        truth = None  # The float64 run is no truer than eager then.
    if not (eager.is_floating_point() or eager.is_complex()):
        return _compare_whole(name, ours, eager, eager if truth is None else truth)
    return _compare_floats(name, ours, eager, truth, triple.usual_rms)


def _compare_whole(name: str, ours: Tensor, eager: Tensor, truth: Tensor) -> Check:
    """Integers and truth values: the share of elements that differ."""
    count = max(eager.numel(), 1)
    error = float((ours != truth).sum()) / count
    eager_error = float((eager != truth).sum()) / count
    allowed = _OF_EAGER * eager_error
    return Check(name, error, eager_error, allowed, error <= allowed)


def _compare_floats(
    name: str, ours: Tensor, eager: Tensor, truth: Tensor | None, usual_rms: float
) -> Check:
    ulp = torch.finfo(eager.dtype).eps
    mine, theirs = _wide(ours), _wide(eager)
    true = theirs if truth is None else _wide(truth)
    kinds = _kinds(mine)
    if bool(((kinds != _kinds(theirs)) & (kinds != _kinds(true))).any()):
        return _failed(name, "NaN or infinity where eager has none, or the other way round")
    size, neighbours = _norm(true, true.isfinite()), usual_rms * math.sqrt(true.numel())
    distance = _norm(mine - true, mine.isfinite() & true.isfinite())
    eager_distance = _norm(theirs - true, theirs.isfinite() & true.isfinite())
    if truth is None:
        noise = size < _NOISE_ULPS * ulp * neighbours
        allowed = _NOISE_ULPS * ulp if noise else math.sqrt(ulp) / 4
    else:
        noise = eager_distance > _NOISE * size
        allowed = _ULPS * ulp
    if not noise and not bool(mine.any()) and bool(theirs.any()):
        return _failed(name, "all zero", error=1.0)
    scale = (max(size, neighbours) if noise else size) or 1.0
    error, eager_error = distance / scale, eager_distance / scale
    allowed += _OF_EAGER * eager_error
    note = "zero but for rounding: measured by its neighbours" if noise else ""
    return Check(name, error, eager_error, allowed, error <= allowed, note)


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj().to(torch.complex128))
    return value.to(torch.float64)


def _kinds(value: Tensor) -> Tensor:
    """0 for a finite element, 1 for NaN, 2 and 3 for the infinities."""
    kinds = value.isnan().to(torch.int8)
    return kinds + 2 * value.isposinf().to(torch.int8) + 3 * value.isneginf().to(torch.int8)


def _norm(value: Tensor, where: Tensor) -> float:
    return float(torch.where(where, value, 0.0).norm())


def _exact(name: str, ok: bool, note: str) -> Check:
    return Check(name, 0.0 if ok else math.inf, 0.0, 0.0, ok, "" if ok else note)


def _failed(name: str, note: str, error: float = math.inf) -> Check:
    return Check(name, error, 0.0, 0.0, False, note)
