"""Verdicts of the judge as one self-contained HTML text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fusewright.judge.times import Conditions, PassTimes
from fusewright.judge.verdict import Verdict
from fusewright.page.document import page
from fusewright.page.markup import Html, anchor, joined, table, tag

_LEVELS = {"accepted": "good", "timed out": "bad", "crashed": "bad"}
_LABELS = {"forward": "forward", "train": "forward and backward"}


def render_verdicts(problem: Path, verdicts: Mapping[Path, Verdict]) -> str:
    """One file in full, or a table of several and a section for each."""
    head = tag("header", tag("h1", f"{problem.stem}: the judge"), *_headline(verdicts))
    several = _overview(verdicts) if len(verdicts) > 1 else Html("")
    sections = (_section(path, verdict) for path, verdict in verdicts.items())
    return page(f"{problem.stem}: verdicts", joined((head, several, *sections)))


def _headline(verdicts: Mapping[Path, Verdict]) -> Iterator[Html]:
    good = sum(each.accepted for each in verdicts.values())
    words = f"{good} of {len(verdicts)} accepted"
    yield tag("p", words, class_=f"verdict {'good' if good == len(verdicts) else 'wrong'}")


def _overview(verdicts: Mapping[Path, Verdict]) -> Html:
    rows = [
        (
            tag("a", path.name, href=f"#{anchor(path.name)}"),
            each.word,
            each.reason,
            f"{each.calls}",
            f"{each.seconds:.1f} s",
        )
        for path, each in verdicts.items()
    ]
    heads = ("file", "verdict", "reason", "calls", "took")
    return table(heads, rows, caption="All files", words=3)


def _section(path: Path, verdict: Verdict) -> Html:
    level = _LEVELS.get(verdict.word, "wrong")
    parts = [tag("p", f"{verdict.word}: {verdict.reason}", class_=f"verdict {level}")]
    evidence = {"check": verdict.check, "expected": verdict.expected, "seen": verdict.seen}
    rows = [(name, value) for name, value in evidence.items() if value]
    if rows:
        parts.append(table(("", ""), rows, caption="Evidence", words=2))
    parts += [_times(each) for each in verdict.times]
    if verdict.conditions:
        parts.append(tag("p", _conditions(verdict.conditions), class_="facts-line"))
    for label, lines in (("Flags", verdict.flags), ("Notes", verdict.notes)):
        if lines:
            items = (tag("li", each) for each in lines)
            parts += [tag("h4", label), tag("ul", *items, class_="notes")]
    if verdict.output:
        printed = tag("pre", verdict.output)
        parts.append(tag("details", tag("summary", "What the file printed"), printed))
    box = "in a box" if verdict.confined else "without a box"
    facts = f"{verdict.calls} calls, {verdict.checks} checks, {verdict.seconds:.1f} s, {box}"
    parts.append(tag("p", facts, class_="facts-line"))
    return tag("section", tag("h2", path.name, id=anchor(path.name)), *parts)


def _times(found: PassTimes) -> Html:
    gains = {each.baseline: each for each in found.speedups}
    rows = []
    for each in found.times:
        gain = gains.get(each.subject)
        ratio = f"{gain.value:.2f}× ({gain.low:.2f} to {gain.high:.2f})" if gain else ""
        interval = f"{each.low_us:.1f} to {each.high_us:.1f}"
        rows.append((each.subject, f"{each.median_us:.1f}", interval, ratio))
    heads = ("subject", "median µs", "95 % interval", "candidate is faster by")
    caption = (
        f"{_LABELS[found.name]}, {found.mode} mode: {found.rounds} rounds, {found.sets} calls a "
        f"request, floor {found.floor_us:.2f} µs, {found.other_cores:.1f} cores busy elsewhere"
    )
    notes = (tag("p", each) for each in found.notes)
    return joined((table(heads, rows, caption=caption), *notes))


def _conditions(found: Conditions) -> str:
    return (
        f"{found.device} · clock: {found.clock} · {found.flushed_bytes >> 20} MiB overwritten "
        f"before each request · copies {found.copy_bytes_per_s / 1e9:.1f} GB/s at best"
    )
