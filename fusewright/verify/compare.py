"""Compares answers with the expected ones: how far is each result off, and how far is eager?

The truth is the float64 run of the same model. An error is ‖x − truth‖ / ‖truth‖, computed in
float64 over the finite elements. Without a float64 run, eager takes its place, and half of the data
type's digits must agree. Nothing here runs a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusewright.errors import VerifyError
from fusewright.problem.inputs import named_tensors
from fusewright.verify.classes import PRECISIONS, Deviation, class_limits
from fusewright.verify.scenarios import PLAIN_LAYOUT, Expected, Results

_ULPS = 4
_OF_EAGER = 2.0
# The class of a result that is exact except for its own rounding; fp32 for all other types.
_OWN_CLASS = {
    torch.float64: "fp64",
    torch.complex128: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
# A single element may be off by this many times the deviation of eager's worst one.
_OF_EAGERS_WORST = 16.0
# Noise: eager has no correct digit, because the true value is zero except for rounding, such as the
# gradient of a bias before a batch norm. Its scale is then the size of the other results.
_NOISE = 0.5
# A kink (ReLU's zero) changes few elements of a gradient: a row of a matrix, an element of a bias.
_KINK_SHARE = 0.125
_NOISE_ULPS = 32


@dataclass(frozen=True)
class Check:
    """One compared result; `allowed` is the largest error that is accepted.

    `largest` is the largest single deviation over the root mean square of the truth, accepted up to
    `largest_allowed`; `spread` is the share of elements that are off by more than rounding.
    `limits` are the largest errors of each precision class. `precision` is the class that fits, or
    empty.
    """

    name: str
    error: float
    eager_error: float
    allowed: float
    ok: bool
    note: str = ""
    largest: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    precision: str = ""
    largest_allowed: float = math.inf
    spread: float = 1.0

    @property
    def is_doubtful(self) -> bool:
        """Whether the result is wrong, but may be right with other values: a gradient, and finite.

        Within rounding of a kink (ReLU's zero) a gradient may fall on either side, as eager's does.
        Such an error depends on the values; a real one stays.
        """
        return "grad " in self.name and not self.ok and 0.0 < self.allowed < math.inf > self.error

    @property
    def badness(self) -> tuple[bool, bool, int, float]:
        """Orders checks of one name: wrong ones last, then by class and by error over allowed."""
        coarseness = PRECISIONS.index(self.precision) if self.precision else 0
        share = self.error / self.allowed if self.allowed else self.error
        return (not self.precision, not self.ok, coarseness, share)


@dataclass(frozen=True)
class Values:
    """The same result from every run; `truth` is None if there is no float64 run.

    `usual_rms` is the root mean square of the largest result of the same kind. `strict` is None if
    no precision class is wanted.
    """

    ours: object
    eager: object
    truth: object
    usual_rms: float
    strict: object = None
    narrow: Mapping[str, object] = field(default_factory=dict)


def settle(looks: Sequence[Check]) -> Check:
    """One verdict on several looks at the same result, each with other values.

    A look that is wrong beyond doubt decides. Otherwise the result is right if the deviations over
    all looks are within what eager's over all looks allow, or if most looks are right and in the
    others few elements are off.
    """
    wrong = [each for each in looks if not each.ok]
    if not wrong or not all(each.is_doubtful for each in wrong):
        return next((each for each in wrong if not each.is_doubtful), looks[0])
    right = [each for each in looks if each.ok]
    note = f"within rounding of a kink in {len(wrong)} of {len(looks)} looks"
    few = all(each.spread <= _KINK_SHARE for each in wrong)
    if few and len(right) > len(wrong):
        return dataclasses.replace(max(right, key=lambda each: each.error), note=note)
    error, eager = (
        math.hypot(*(getattr(each, name) for each in looks)) / math.sqrt(len(looks))
        for name in ("error", "eager_error")
    )
    allowed = wrong[0].allowed + _OF_EAGER * (eager - wrong[0].eager_error)
    largest = max(each.largest for each in looks)
    if error > allowed or largest > max(each.largest_allowed for each in looks):
        return max(wrong, key=lambda each: each.error)
    pooled = dataclasses.replace(looks[0], error=error, eager_error=eager, allowed=allowed)
    return dataclasses.replace(pooled, largest=largest, ok=True, note=note)


def compare_answers(found: Results, layout: str, expected: Expected) -> Iterator[Check]:
    """Check everything that came out for one gradient layout."""
    eager = expected.eager[layout]
    _require_same_outputs(found, eager)
    given = {f"input {name}": each for name, each in named_tensors(expected.question.inputs)}
    for name in found:
        if name in given and name not in eager:
            yield _failed(name, "the candidate writes into this argument, the model does not")
    truth = expected.truth.get(layout, {})
    strict = expected.strict.get(layout, {})
    for name, value in eager.items():
        gradient = name.startswith("grad ")
        values = Values(
            # An argument that was not written still has the given values.
            found.get(name, given.get(name)),
            value,
            truth.get(name),
            expected.usual_gradient_rms if gradient else expected.usual_rms,
            strict.get(name),
            {kind: each[layout].get(name) for kind, each in expected.narrow.items()},
        )
        check = compare(name, values)
        how = f"{layout} gradient" if gradient and layout not in PLAIN_LAYOUT else ""
        why = "" if truth else expected.why
        yield dataclasses.replace(check, note="; ".join(filter(None, (how, check.note, why))))


def _require_same_outputs(found: Results, eager: Results) -> None:
    ours = [each for each in found if each.startswith("output")]
    theirs = [each for each in eager if each.startswith("output")]
    if ours != theirs:
        raise VerifyError(
            f"the candidate returns {', '.join(ours) or 'nothing'} where the model "
            f"returns {', '.join(theirs) or 'nothing'}"
        )


def compare(name: str, values: Values) -> Check:
    """Check one result: a tensor, an absent gradient or a plain value."""
    ours, eager = values.ours, values.eager
    if isinstance(eager, Tensor) and isinstance(ours, Tensor):
        return _compare_tensors(name, ours, eager, values)
    if isinstance(eager, Tensor):
        return _failed(name, "missing: eager returns a tensor")
    if isinstance(ours, Tensor):
        # Eager gives an unused parameter no gradient; zeros mean the same.
        return _exact(name, not bool(ours.any()), "eager returns none")
    return _exact(name, ours == eager, f"{ours!r}, eager returns {eager!r}")


def root_mean_square(value: object) -> float:
    """The root mean square of the finite elements; 0 if this is not a floating tensor."""
    if not isinstance(value, Tensor) or not value.numel() or not _is_inexact(value):
        return 0.0
    wide = _wide(value)
    return float(torch.where(wide.isfinite(), wide, 0.0).norm()) / math.sqrt(wide.numel())


def _compare_tensors(name: str, ours: Tensor, eager: Tensor, values: Values) -> Check:
    if ours.shape != eager.shape:
        return _failed(name, f"shape {tuple(ours.shape)}, eager's is {tuple(eager.shape)}")
    if ours.dtype != eager.dtype:
        return _failed(name, f"{ours.dtype}, eager's is {eager.dtype}")
    if ours.device != eager.device:
        return _failed(name, f"on {ours.device}, eager's is on {eager.device}")
    ruler = _ruler(eager, values)
    mine, theirs = ruler.deviation(ours), ruler.deviation(eager)
    if not math.isfinite(mine.error):
        return _failed(name, "NaN or infinity where eager has none, or the reverse")
    if ruler.inexact and not ruler.noise and not bool(ours.any()) and bool(eager.any()):
        return _failed(name, "all zero", error=1.0)
    allowed = ruler.slack + _OF_EAGER * theirs.error
    note = "zero except for rounding: measured by other results" if ruler.noise else ""
    check = Check(name, mine.error, theirs.error, allowed, mine.error <= allowed, note)
    if ruler.has_truth:
        # Noise has no size of its own, so a single deviation cannot be measured.
        usual = _OF_EAGERS_WORST * (ruler.rounding + theirs.largest)
        usual = math.inf if ruler.noise else usual
        check = dataclasses.replace(
            check, largest=mine.largest, largest_allowed=usual, spread=mine.spread
        )
        if check.ok and mine.largest > usual:
            lone = f"a single element is off by {mine.largest:.1e} times the root mean square"
            check = dataclasses.replace(check, ok=False, note=lone)
    return _classified(check, ruler, eager, values)


def _classified(check: Check, ruler: _Ruler, eager: Tensor, values: Values) -> Check:
    """The check with its precision class."""
    own = _own_class(eager)
    if values.strict is None or not ruler.has_truth:
        precision = own if check.ok else ""
        return dataclasses.replace(check, limits={own: check.allowed}, precision=precision)
    strict = ruler.deviation(values.strict)
    narrow = {kind: ruler.deviation(each) for kind, each in values.narrow.items()}
    limits = class_limits(own, _ulp(eager), ruler.rounding, strict, narrow)
    fits = [
        kind
        for kind, limit in limits.items()
        if check.error <= limit.error and (check.largest <= limit.largest or ruler.noise)
    ]
    precision = min(fits, key=PRECISIONS.index, default="")
    beyond = "" if precision else "the error is beyond every precision class"
    return dataclasses.replace(
        check,
        note=check.note if ruler.noise else beyond,
        limits={kind: limit.error for kind, limit in limits.items()},
        precision=precision,
    )


@dataclass(frozen=True)
class _Ruler:
    """Measures distances from the truth; for integers, the share of elements that differ.

    `slack` is what is allowed in addition to eager's own error. `rounding` is a few units in the
    last place of the largest element, over the root mean square.
    """

    true: Tensor
    eager: Tensor
    scale: float
    rms: float
    slack: float
    rounding: float
    noise: bool
    has_truth: bool

    @property
    def inexact(self) -> bool:
        return _is_inexact(self.eager)

    def deviation(self, value: object) -> Deviation:
        """Infinite if an element is NaN or infinite, and neither eager's nor the true one is so."""
        if not isinstance(value, Tensor) or value.shape != self.eager.shape:
            return Deviation(math.inf, math.inf)
        value = value.detach().to(self.eager.dtype)
        mine, true = _wide(value), _wide(self.true)
        if not mine.numel():
            return Deviation(0.0, 0.0)
        finite = mine.isfinite() & true.isfinite()
        if not bool(finite.all()):
            kinds = _kinds(mine)
            if bool(((kinds != _kinds(_wide(self.eager))) & (kinds != _kinds(true))).any()):
                return Deviation(math.inf, math.inf)
        off = torch.where(finite, mine - true, 0.0)
        largest = float(off.abs().max()) / self.rms
        spread = float((off.abs() > _OF_EAGERS_WORST * self.rounding * self.rms).double().mean())
        if self.inexact:
            return Deviation(float(off.norm()) / self.scale, largest, spread)
        # float64 cannot represent every integer
        return Deviation(float((value != self.true).sum()) / value.numel(), largest)


def _ruler(eager: Tensor, values: Values) -> _Ruler:
    truth = values.truth if isinstance(values.truth, Tensor) else None
    # If the model computes in float64 itself, a float64 run is no better than eager.
    if truth is not None and (truth.shape != eager.shape or _own_class(eager) == "fp64"):
        truth = None
    true, theirs, ulp = _wide(eager if truth is None else truth), _wide(eager), _ulp(eager)
    finite = true.isfinite()
    known = torch.where(finite, true, 0.0)
    size, neighbours = float(known.norm()), values.usual_rms * math.sqrt(true.numel())
    if not _is_inexact(eager):
        noise, slack = False, 0.0
    elif truth is None:
        noise = size < _NOISE_ULPS * ulp * neighbours
        slack = _NOISE_ULPS * ulp if noise else math.sqrt(ulp) / 4
    else:
        off = torch.where(finite & theirs.isfinite(), theirs - true, 0.0)
        noise, slack = float(off.norm()) > _NOISE * size, _ULPS * ulp
    rms = size / math.sqrt(max(true.numel(), 1)) or 1.0
    peak = float(known.abs().max()) / rms if true.numel() else 0.0
    return _Ruler(
        true=eager if truth is None else truth,
        eager=eager,
        scale=(max(size, neighbours) if noise else size) or 1.0,
        rms=rms,
        slack=slack,
        rounding=_ULPS * ulp * peak,
        noise=noise,
        has_truth=truth is not None,
    )


def _own_class(value: Tensor) -> str:
    return _OWN_CLASS.get(value.dtype, "fp32")


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _ulp(value: Tensor) -> float:
    return float(torch.finfo(value.dtype).eps) if _is_inexact(value) else 0.0


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj().to(torch.complex128))
    return value.to(torch.float64)


def _kinds(value: Tensor) -> Tensor:
    """0 for a finite element, 1 for NaN, 2 and 3 for the two infinities."""
    kinds = value.isnan().to(torch.int8)
    return kinds + 2 * value.isposinf().to(torch.int8) + 3 * value.isneginf().to(torch.int8)


def _exact(name: str, ok: bool, note: str) -> Check:
    if not ok:
        return _failed(name, note)
    return Check(name, 0.0, 0.0, 0.0, True, limits={"fp32": 0.0}, precision="fp32")


def _failed(name: str, note: str, error: float = math.inf) -> Check:
    return Check(name, error, 0.0, 0.0, False, note)
