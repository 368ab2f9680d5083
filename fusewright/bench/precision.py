"""Which precision a result has: its error beside the errors that narrower products would make.

The limits are measured, not assumed: the model runs in float64 once as it is (the truth) and
once for each class with the operands of its products rounded to the class's digits. TF32 and
fp16 have the same digits, so an error cannot tell them apart; both are called tf32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.bench.record import PRECISIONS, ValueCheck
from fusewright.verify.compare import Triple, compare, root_mean_square

# Significant binary digits, the leading one included.
DIGITS = {"tf32": 11, "bf16": 8}
_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot convolution convolution_backward".split())
_OWN_CLASS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
# Orders of summation, split products and Winograd's transforms differ by this much in fp32.
_OF_EAGER = 8.0
_ULPS = 4
# Tensor cores cut TF32 operands off where the emulation rounds: twice the error.
_SLACK = {"tf32": 3.0, "bf16": 3.0}
_PEAK_SLACK = {"own": 16.0, "tf32": 4.0, "bf16": 4.0}
# Below this the products of a model do not show in a result.
_VISIBLE_ULPS = 100


@dataclass(frozen=True)
class Expected:
    """The same results from eager, from eager without TF32, in float64, and in narrower products.

    `truth` is empty where there is no float64 run; `why` says so in words.
    """

    eager: Mapping[str, object]
    strict: Mapping[str, object]
    truth: Mapping[str, object]
    narrow: Mapping[str, Mapping[str, object]]
    why: str = ""


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the float64 operands of every product to a number of binary digits."""

    def __init__(self, digits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digits = digits

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
        if name in _PRODUCTS:
            args = tuple(rounded(each, self.digits) for each in args)
        return func(*args, **(kwargs or {}))


def rounded(value: Any, digits: int) -> Any:
    """A float64 tensor to so many digits (Veltkamp's split); anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        return value
    spread = value * float(2 ** (53 - digits) + 1)
    return torch.where(spread.isfinite(), spread - (spread - value), value)


def check_values(
    when: str, ours: Mapping[str, object], expected: Expected
) -> tuple[ValueCheck, ...]:
    """Every expected result against what the candidate gave under the same name."""
    return tuple(
        _check(when, name, ours.get(name), expected, _usual(name, expected))
        for name in expected.eager
    )


def coarsest(checks: Sequence[ValueCheck]) -> str:
    """The class of a candidate; empty where it has nothing right or something wrong."""
    if not checks or not all(each.ok for each in checks):
        return ""
    return max((each.precision for each in checks), key=PRECISIONS.index)


def _check(when: str, name: str, mine: object, expected: Expected, usual: float) -> ValueCheck:
    eager, truth = expected.eager[name], expected.truth.get(name)

    def against(value: object) -> Any:
        return compare(name, Triple(value, eager, truth, usual))

    check, own = against(mine), _own_class(eager)
    if not isinstance(truth, Tensor) or not math.isfinite(check.error) or own == "fp64":
        # Compared with eager, or of another shape or type: there is nothing between right and not.
        limits = {own: check.allowed}
        precision = own if check.ok else ""
        error, theirs = check.error, check.eager_error
        note = "; ".join(filter(None, (check.note, expected.why)))
        return ValueCheck(when, name, error, theirs, 0.0, limits, precision, check.ok, note)
    largest = largest_error(mine, truth)
    bounds = _bounds(name, own, expected, truth, lambda value: float(against(value).error))
    # What is zero but for rounding has no size that a single deviation could be measured by.
    fits = [
        kind
        for kind, (limit, peak) in bounds.items()
        if check.error <= limit and (largest <= peak or check.note)
    ]
    precision = min(fits, key=PRECISIONS.index, default="")
    note = check.note or ("" if precision else "the error is beyond every precision class")
    limits = {kind: limit for kind, (limit, _) in bounds.items()}
    return ValueCheck(
        when, name, check.error, check.eager_error, largest, limits, precision, bool(fits), note
    )


def _bounds(
    name: str,
    own: str,
    expected: Expected,
    truth: Tensor,
    error_of: Callable[[object], float],
) -> dict[str, tuple[float, float]]:
    """For each class the largest error, and the largest single deviation, that belong to it."""
    eager, strict = expected.eager[name], expected.strict[name]
    limit = _ULPS * _ulp(eager) + _OF_EAGER * error_of(strict)
    peak = _PEAK_SLACK["own"] * (_peak_ulps(eager, truth) + largest_error(strict, truth))
    if own != "fp32":
        return {own: (limit, peak)}
    bounds = {own: (limit, peak)}
    for kind, values in expected.narrow.items():
        narrow = _as_type(values.get(name), eager)
        error = error_of(narrow)
        if math.isfinite(error):  # A narrow run that overflows sets no limit.
            bounds[kind] = (_SLACK[kind] * error, _PEAK_SLACK[kind] * largest_error(narrow, truth))
    visible = bounds["tf32"][0] if "tf32" in bounds else 0.0
    if visible > _VISIBLE_ULPS * _ulp(eager) and limit > visible:
        # A model that lowers its own precision has no fp32 to be measured by.
        del bounds[own]
        bounds["tf32"] = (limit, max(peak, bounds["tf32"][1]))
    return bounds


def largest_error(value: object, truth: Tensor) -> float:
    """The largest deviation of a finite element, over the root mean square of the truth."""
    if not isinstance(value, Tensor) or value.shape != truth.shape or not truth.numel():
        return 0.0
    true = _wide(truth)
    distance = torch.where(true.isfinite(), _wide(value) - true, 0.0).abs().max()
    size = torch.where(true.isfinite(), true, 0.0).norm() / math.sqrt(true.numel())
    return float(distance / size) if size else float(distance)


def _peak_ulps(eager: object, truth: Tensor) -> float:
    """A few units in the last place of the largest element, over the root mean square."""
    return _ULPS * _ulp(eager) * largest_error(torch.zeros_like(truth), truth)


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    return torch.view_as_real(value.to(torch.complex128)) if value.is_complex() else value.double()


def _as_type(value: object, like: object) -> object:
    """The float64 run's result in the model's own type, as a comparison wants it."""
    both = isinstance(value, Tensor) and isinstance(like, Tensor)
    return value.to(like.dtype) if both else value  # type: ignore[attr-defined]


def _own_class(value: object) -> str:
    return _OWN_CLASS.get(value.dtype, "fp32") if isinstance(value, Tensor) else "fp32"


def _ulp(value: object) -> float:
    floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return float(torch.finfo(value.dtype).eps) if floating else 0.0  # type: ignore[attr-defined]


def _usual(name: str, expected: Expected) -> float:
    """The largest root mean square among results of the same kind, as the check of noise wants."""
    best = expected.truth or expected.eager
    gradient = name.startswith("grad ")
    same = [each for key, each in best.items() if key.startswith("grad ") == gradient]
    return max(map(root_mean_square, same), default=0.0)
