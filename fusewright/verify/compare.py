"""Compares answers with the expected ones: how far is each result off, and how far is eager?

The truth is the float64 run of the same model. An error is ‖x − truth‖ / ‖truth‖, computed in
float64 over the finite elements. Without a float64 run, eager takes its place, and half of the data
type's digits must agree. Nothing here runs a model, and no tensor is converted as a whole.
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
from fusewright.verify.figures import Figures, Sums, is_inexact, measure, peak_of
from fusewright.verify.scenarios import PLAIN_LAYOUT, Expected, Results, Usual

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
# Another right run is a measure only if it is right itself: no rounding is larger than this.
_MOST_OF_OTHERS, _MOST_ULPS_OF_OTHERS = 1e-2, 32
# What two runs may differ by, as a multiple of the errors that both have in a smaller call.
_OF_SMALLER, _OF_SMALLERS_WORST = 4.0, 2.0


@dataclass(frozen=True)
class Check:
    """One compared result; `allowed` is the largest error that is accepted.

    `largest` is the largest single deviation over the root mean square of the truth, accepted up to
    `largest_allowed`; `spread` is the share of elements that are off by more than rounding.
    `limits` are the largest errors of each precision class. `precision` is the class that fits, or
    empty. `noise` says that the true value is zero except for rounding, `float64` whether there was
    a float64 run to compare with. `forgiven` is a result that is wrong with a few values only.
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
    noise: bool = False
    float64: bool = True
    forgiven: bool = False

    @property
    def usual(self) -> Usual:
        """The errors of this check, as a measure for the same result of a larger call."""
        return Usual(self.error + self.eager_error, self.largest_allowed, self.noise)

    @property
    def is_only_inexact(self) -> bool:
        """Whether the result is wrong by a finite error, which another right run may have too."""
        return not self.ok and 0.0 < self.allowed < math.inf > self.error

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
    no precision class is wanted. `others` are further right runs: eager's error may be small by
    luck, and theirs is allowed as well. `usual` are the errors of a smaller call.
    """

    ours: object
    eager: object
    truth: object
    usual_rms: float
    strict: object = None
    narrow: Mapping[str, object] = field(default_factory=dict)
    others: Sequence[object] = ()
    usual: Usual | None = None


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
        best = max(right, key=lambda each: each.error)
        return dataclasses.replace(best, note=note, forgiven=True)
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
            [each.get(name) for each in expected.others.get(layout, ())],
            expected.usual.get(name),
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
    if isinstance(eager, Tensor):
        return misfit(name, values) or judge(name, values, figures_of(values))
    if isinstance(ours, Tensor):
        # Eager gives an unused parameter no gradient; zeros mean the same.
        return _exact(name, not bool(ours.any()), "eager returns none")
    return _exact(name, ours == eager, f"{ours!r}, eager returns {eager!r}")


def misfit(name: str, values: Values) -> Check | None:
    """The verdict on what is no tensor like eager's; None if it is one."""
    ours, eager = values.ours, values.eager
    assert isinstance(eager, Tensor)
    if not isinstance(ours, Tensor):
        return _failed(name, "missing: eager returns a tensor")
    if ours.shape != eager.shape:
        return _failed(name, f"shape {tuple(ours.shape)}, eager's is {tuple(eager.shape)}")
    if ours.dtype != eager.dtype:
        return _failed(name, f"{ours.dtype}, eager's is {eager.dtype}")
    if ours.device != eager.device:
        return _failed(name, f"on {ours.device}, eager's is on {eager.device}")
    return None


def figures_of(values: Values) -> Figures:
    """The figures of every run of one result, against the truth or, without one, eager."""
    eager = values.eager
    assert isinstance(eager, Tensor)
    truth = truth_of(values)
    runs = [values.ours, eager, values.strict, *values.narrow.values(), *values.others]
    return measure(eager if truth is None else truth, eager, runs, coarse_deviation(eager))


def coarse_deviation(eager: Tensor) -> float:
    """A deviation of one element that is more than rounding."""
    return _OF_EAGERS_WORST * _ULPS * _ulp(eager) * peak_of(eager) if is_inexact(eager) else 0.0


def truth_of(values: Values) -> Tensor | None:
    """The float64 result, if there is one that is truer than eager's."""
    eager, truth = values.eager, values.truth
    if not isinstance(truth, Tensor) or not isinstance(eager, Tensor):
        return None
    # If the model computes in float64 itself, a float64 run is no better than eager.
    return None if truth.shape != eager.shape or _own_class(eager) == "fp64" else truth


def judge(name: str, values: Values, figures: Figures, *, float64: bool | None = None) -> Check:
    """The verdict on one tensor; `float64` says whether the figures are against a float64 run."""
    ours, eager = values.ours, values.eager
    assert isinstance(ours, Tensor) and isinstance(eager, Tensor)
    has_truth = truth_of(values) is not None if float64 is None else float64
    ruler = _ruler(eager, values, figures, has_truth)
    mine, *others = (ruler.deviation(each) for each in figures.runs)
    theirs = others[0]
    if not math.isfinite(mine.error):
        return _failed(name, "NaN or infinity where eager has none, or the reverse")
    if is_inexact(eager) and not ruler.noise and not bool(ours.any()) and bool(eager.any()):
        return _failed(name, "all zero", error=1.0)
    right = _worst_right(theirs, others[2 + len(values.narrow) :], eager)
    allowed = ruler.slack + _OF_EAGER * right.error
    note = "zero except for rounding: measured by other results" if ruler.noise else ""
    check = Check(name, mine.error, theirs.error, allowed, mine.error <= allowed, note)
    check = dataclasses.replace(check, noise=ruler.noise, float64=has_truth, spread=mine.spread)
    check = _single_elements(check, ruler, mine, right, values.usual)
    return _classified(check, ruler, eager, values, others[1 : 2 + len(values.narrow)])


def _worst_right(eager: Deviation, others: Sequence[Deviation], like: Tensor) -> Deviation:
    """The largest deviations of the runs that are known to be right."""
    most = max(_MOST_OF_OTHERS, _MOST_ULPS_OF_OTHERS * _ulp(like))
    right = [eager, *(each for each in others if each.error <= most)]
    return Deviation(max(each.error for each in right), max(each.largest for each in right))


def _single_elements(
    check: Check, ruler: _Ruler, mine: Deviation, right: Deviation, usual: Usual | None
) -> Check:
    """The check with the verdict on its worst element, if there is a measure for it."""
    limit = math.inf
    if ruler.has_truth:
        limit = _OF_EAGERS_WORST * (ruler.rounding + right.largest)
    elif usual is not None:
        limit = _OF_EAGERS_WORST * (ruler.rounding + right.largest)
        limit += _OF_SMALLERS_WORST * usual.largest
    # Noise has no size of its own, so a single deviation cannot be measured.
    limit = math.inf if ruler.noise else limit
    if ruler.has_truth or usual is not None:
        check = dataclasses.replace(check, largest=mine.largest, largest_allowed=limit)
    if check.ok and mine.largest > limit:
        lone = f"a single element is off by {mine.largest:.1e} times the root mean square"
        check = dataclasses.replace(check, ok=False, note=lone)
    return check


def _classified(
    check: Check, ruler: _Ruler, eager: Tensor, values: Values, found: Sequence[Deviation]
) -> Check:
    """The check with its precision class; `found` are the strict run and the narrow ones."""
    own = _own_class(eager)
    if values.strict is None or not ruler.has_truth:
        precision = own if check.ok else ""
        return dataclasses.replace(check, limits={own: check.allowed}, precision=precision)
    narrow = dict(zip(values.narrow, found[1:], strict=True))
    limits = class_limits(own, _ulp(eager), ruler.rounding, found[0], narrow)
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
    """Turns figures into distances from the truth; for integers, the share that differs.

    `slack` is what is allowed in addition to eager's own error. `rounding` is a few units in the
    last place of the largest element, over the root mean square.
    """

    count: int
    inexact: bool
    scale: float
    rms: float
    slack: float
    rounding: float
    noise: bool
    has_truth: bool

    def deviation(self, sums: Sums | None) -> Deviation:
        """Infinite if an element is NaN or infinite, and neither eager's nor the true one is so."""
        if sums is None or sums.misplaced:
            return Deviation(math.inf, math.inf)
        if not self.count:
            return Deviation(0.0, 0.0)
        largest, spread = sums.largest / self.rms, sums.beyond / self.count
        if self.inexact:
            return Deviation(math.sqrt(sums.squares) / self.scale, largest, spread)
        return Deviation(sums.differing / self.count, largest)


def _ruler(eager: Tensor, values: Values, figures: Figures, has_truth: bool) -> _Ruler:
    ulp, size, count = _ulp(eager), math.sqrt(figures.squares), figures.count
    neighbours, usual = values.usual_rms * math.sqrt(count), values.usual
    off = figures.runs[1]
    if not is_inexact(eager):
        noise, slack = False, 0.0
    elif has_truth:
        noise = off is None or math.sqrt(off.squares) > _NOISE * size
        slack = _ULPS * ulp
    else:
        noise = size < _NOISE_ULPS * ulp * neighbours or (usual is not None and usual.noise)
        slack = _NOISE_ULPS * ulp if noise else math.sqrt(ulp) / 4
        slack = max(slack, _OF_SMALLER * usual.error) if usual is not None else slack
    rms = size / math.sqrt(max(count, 1)) or 1.0
    return _Ruler(
        count=count,
        inexact=is_inexact(eager),
        scale=(max(size, neighbours) if noise else size) or 1.0,
        rms=rms,
        slack=slack,
        rounding=_ULPS * ulp * figures.peak / rms,
        noise=noise,
        has_truth=has_truth,
    )


def _own_class(value: Tensor) -> str:
    return _OWN_CLASS.get(value.dtype, "fp32")


def _ulp(value: Tensor) -> float:
    return float(torch.finfo(value.dtype).eps) if is_inexact(value) else 0.0


def _exact(name: str, ok: bool, note: str) -> Check:
    if not ok:
        return _failed(name, note)
    return Check(name, 0.0, 0.0, 0.0, True, limits={"fp32": 0.0}, precision="fp32")


def _failed(name: str, note: str, error: float = math.inf) -> Check:
    return Check(name, error, 0.0, 0.0, False, note)
