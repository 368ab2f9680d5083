"""The verdict on each candidate in words: its speed against the best baseline that is as precise.

A baseline with a lower precision does less work, so a fair comparison leaves it out. If such a
baseline is faster, the sentence says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.bench.record import Pass, Ratio, Record, Result
from fusewright.page.figures import in_words, ratio_text
from fusewright.verify.classes import coarseness

# An interval that contains 1 shows equal speed only if it is at most this wide.
_CLOSE = 0.06


@dataclass(frozen=True)
class Standing:
    """One candidate in one pass. `against` is None if no baseline is as precise."""

    pass_name: str
    result: Result
    against: Ratio | None
    against_precision: str = ""
    coarser_and_faster: tuple[str, ...] = ()

    @property
    def noise(self) -> bool:
        """Whether the interval contains 1."""
        return self.against is not None and self.against.low <= 1.0 <= self.against.high

    @property
    def equal_precision(self) -> bool:
        return self.against is None or self.against_precision == self.result.precision


def main_subject(record: Record) -> str:
    """Our candidate, or the first foreign one, or "" if there is neither."""
    kinds = {each.name: each.kind for each in record.candidates}
    ours = [name for name in record.subjects if kinds[name] == "ours"]
    return next(iter((*ours, *record.subjects)), "")


def precision_text(precision: str) -> str:
    return "TF32" if precision == "tf32" else precision


def find(results: tuple[Result, ...], candidate: str) -> Result | None:
    return next((each for each in results if each.candidate == candidate), None)


def standing(found: Pass, subject: str) -> Standing | None:
    result = find(found.results, subject)
    if result is None:
        return None
    names = {each.candidate: each.precision for each in found.results}
    classes = {name: coarseness(each) for name, each in names.items()}
    own = coarseness(result.precision)
    fair = [each for each in result.ratios if classes.get(each.baseline, own) <= own]
    coarser = [each for each in result.ratios if classes.get(each.baseline, own) > own]
    best = min(fair, key=lambda each: each.ratio, default=None)
    return Standing(
        found.name,
        result,
        best,
        names.get(best.baseline, result.precision) if best else "",
        tuple(each.baseline for each in coarser if each.high < 1.0),
    )


def standings(record: Record, subject: str) -> tuple[Standing, ...]:
    """One candidate in every pass. Training comes first: users spend most of their time on it."""
    found = [each for one in record.passes if (each := standing(one, subject))]
    return tuple(sorted(found, key=lambda each: each.pass_name != "train"))


def sentence(record: Record, subject: str) -> str:
    """The verdict on one candidate: its speed, then the result of the checks."""
    if record.status != "ok":
        return f"No result: {record.status}. {record.error}".strip()
    found = standings(record, subject)
    if not found:
        return "Nothing was compared with the baselines."
    speeds = [_speed(each) for each in found]
    return _capital("; ".join(speeds)) + f"; {_checks(found)}."


def level(record: Record, subject: str) -> str:
    """wrong, bad (slower), coarse (less precise than the baseline), even or good."""
    found = standings(record, subject)
    if record.status != "ok" or any(each.result.status in ("wrong", "failed") for each in found):
        return "wrong"
    ratios = [each.against for each in found if each.against and each.equal_precision]
    if any(each.high < 1.0 for each in ratios):
        return "bad"
    if not all(each.equal_precision for each in found):
        return "coarse"
    return "good" if any(each.low > 1.0 for each in ratios) else "even"


def _speed(each: Standing) -> str:
    where = f"in {in_words(each.pass_name)}"
    if each.result.status != "timed":
        words = f" ({each.result.note})" if each.result.note else ""
        return f"{each.result.status} {where}, so not timed{words}"
    if each.against is None:
        return f"timed {where}, but no baseline is as precise"
    name = f"the best baseline ({each.against.baseline})"
    if not each.equal_precision:
        name = (
            f"the best baseline ({each.against.baseline}, {precision_text(each.against_precision)})"
        )
        where += f", but in {precision_text(each.result.precision)}"
    if each.noise:
        low, high = each.against.low, each.against.high
        text = f"as fast as {name} {where}, within noise"
        if high - low > _CLOSE:
            text = f"no clear difference from {name} {where}: "
            text += f"{ratio_text(low)} to {ratio_text(high)}"
    elif each.against.ratio >= 1:
        text = f"{ratio_text(each.against.ratio)} faster than {name} {where}"
    else:
        text = f"{ratio_text(1 / each.against.ratio)} slower than {name} {where}"
    if each.coarser_and_faster:
        text += f" (faster, but less precise: {', '.join(each.coarser_and_faster)})"
    return text


def _checks(found: tuple[Standing, ...]) -> str:
    checks = [check for each in found for check in each.result.checks]
    bad = sum(not check.ok for check in checks)
    if bad:
        return f"{bad} of {len(checks)} checks wrong"
    if not checks:
        return "nothing was checked"
    coarsest = max((each.result.precision for each in found), key=coarseness)
    return f"all checks ok in {precision_text(coarsest)}" if coarsest else "all checks ok"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
