"""The overview of many problems: what needs attention, the spread of speedups, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.bench.record import PASSES, Record, Result, Spread
from fusewright.bench.summary import THRESHOLDS, spreads
from fusewright.page.accuracy import worst_check
from fusewright.page.drawing import Chart, settings, svg
from fusewright.page.figures import (
    NONE,
    error_text,
    in_words,
    ratio_text,
    share_text,
    time_text,
    title_of,
)
from fusewright.page.look import STAND_IN, Palette
from fusewright.page.markup import Html, cell, joined, table, tag
from fusewright.page.standing import Standing, level, main_subject, sentence, standings
from fusewright.page.strips import strip_chart
from fusewright.page.tables import badge, number

_MOST_SLOW = 10
_LEVELS = ("wrong", "bad", "coarse", "even", "good")
_WORDS = {"bad": "slower", "coarse": "less precise", "even": "as fast", "good": "faster"}


@dataclass(frozen=True)
class Entry:
    """A problem and the id of its section."""

    record: Record
    anchor: str

    @property
    def standings(self) -> tuple[Standing, ...]:
        return standings(self.record, main_subject(self.record))

    @property
    def level(self) -> str:
        return level(self.record, main_subject(self.record))

    @property
    def link(self) -> Html:
        return tag("a", self.record.problem.name, href=f"#{self.anchor}")


def folder_charts(records: Sequence[Record], palette: Palette) -> list[Chart]:
    """The spread of speedups, one chart for each pass."""
    found = spreads(records)
    with settings():
        drawn = [strip_chart(records, found, name, palette) for name in PASSES]
    return [each for each in drawn if each]


def overview(entries: Sequence[Entry]) -> Html:
    records = [each.record for each in entries]
    figures = [
        tag("figure", svg(each, f"all-{each.name}-")) for each in folder_charts(records, STAND_IN)
    ]
    parts = [_needs_attention(entries)]
    if figures:
        words = "Red marks are slower than the baseline. Hollow marks have a lower precision."
        drawn = tag("div", *figures, class_="charts")
        parts.append(tag("section", tag("h2", "Spread of speedups"), tag("p", words), drawn))
        parts.append(tag("section", _spreads_table(spreads(records), entries)))
    parts.append(tag("section", tag("h2", "All problems"), _problems_table(entries)))
    return joined(parts)


def headline(entries: Sequence[Entry]) -> tuple[str, str]:
    """One sentence on all problems, and its level."""
    counts = {name: sum(each.level == name for each in entries) for name in _LEVELS}
    lost = sum(each.record.status != "ok" for each in entries)
    parts = [
        f"{counts['good']} of {len(entries)} problems faster than their best baseline",
        f"{counts['even']} as fast",
        f"{counts['bad']} slower",
        f"{counts['coarse']} of lower precision than the baseline",
        f"{counts['wrong'] - lost} wrong or failed",
        f"{lost} without any result",
    ]
    kept = [parts[0], *(each for each in parts[1:] if not each.startswith("0 "))]
    worst = "wrong" if counts["wrong"] else "bad" if counts["bad"] else "good"
    return "; ".join(kept) + ".", worst


def _needs_attention(entries: Sequence[Entry]) -> Html:
    """Failed, wrong and less precise results in the entries' order, then the slowest ones."""
    wrong = [each for each in entries if each.level in ("wrong", "coarse")]
    slow = sorted((each for each in entries if each.level == "bad"), key=_least_ratio)
    if not wrong and not slow:
        return Html("")
    rows = [
        tag(
            "li",
            each.link,
            ": ",
            sentence(each.record, main_subject(each.record)),
            class_=each.level,
        )
        for each in (*wrong, *slow[:_MOST_SLOW])
    ]
    left = len(slow) - _MOST_SLOW
    more = tag("p", f"{left} more are slower. The table below lists them.") if left > 0 else ""
    return tag("section", tag("h2", "Needs attention"), tag("ul", *rows, class_="others"), more)


def _least_ratio(entry: Entry) -> float:
    return min(each.against.ratio for each in entry.standings if each.against)


def _spreads_table(found: Sequence[Spread], entries: Sequence[Entry]) -> Html:
    heads = ["pass", "candidate", "against", "problems", "geometric mean", "median"]
    heads += [f"faster than {each:g}×" for each in THRESHOLDS]
    rows = [
        [
            in_words(each.pass_name),
            each.candidate,
            each.baseline,
            number(f"{each.count}"),
            number(ratio_text(each.geometric_mean)),
            number(ratio_text(each.median)),
            *(number(share_text(each.shares.get(f"{t:g}"))) for t in THRESHOLDS),
        ]
        for each in found
    ]
    words = f"Shares are over the problems in which both were timed, of {len(entries)} in all."
    coarse = sum(any(not each.equal_precision for each in entry.standings) for entry in entries)
    if coarse:
        words += f" Not counted, and marked below: {coarse} with a lower precision."
    return table(heads, rows, caption=words, words=3)


def _problems_table(entries: Sequence[Entry]) -> Html:
    passes = [each for each in PASSES if any(_of(entry, each) for entry in entries)]
    heads = ["problem", "result"]
    for each in passes:
        name = in_words(each)
        heads += [f"{name}: time", f"{name}: vs best baseline", f"{name}: share of floor"]
    heads += ["class", "worst error"]
    buttons = [tag("button", each, type="button") for each in heads]
    rows = [_problem_row(each, passes) for each in entries]
    above = any((e.result.floor_share or 0.0) > 1.0 for each in entries for e in each.standings)
    words = "Click a heading to sort. A name links to its section. "
    words += ", ".join(map(title_of, passes))
    words += "; above 100 % of the fp32 floor: tensor cores with fp32's accuracy" if above else ""
    return table(buttons, rows, caption=words, class_="sortable", words=2)


def _of(entry: Entry, pass_name: str) -> Standing | None:
    return next((each for each in entry.standings if each.pass_name == pass_name), None)


def _problem_row(entry: Entry, passes: Sequence[str]) -> Html:
    cells: list[str] = [
        tag("th", entry.link, scope="row", data_sort=entry.record.problem.name),
        tag("td", _state(entry), data_sort=_LEVELS.index(entry.level)),
    ]
    for each in passes:
        cells += _pass_cells(_of(entry, each))
    results = [each.result for each in entry.standings]
    worst = [check.error for each in results if (check := worst_check(each))]
    cells.append(tag("td", badge(results[0]) if results else NONE))
    cells.append(number(error_text(max(worst, default=None)), max(worst, default=None)))
    return tag("tr", *map(cell, cells), class_=entry.level)


def _pass_cells(found: Standing | None) -> list[Html]:
    result: Result | None = found.result if found else None
    timing = result.timing if result else None
    ratio = found.against if found else None
    share = result.floor_share if result else None
    against = f"{ratio_text(ratio.ratio)} {ratio.baseline}" if ratio else NONE
    slower = "bad" if ratio and ratio.high < 1 else ""
    return [
        number(
            time_text(timing.median_us if timing else None), timing.median_us if timing else None
        ),
        number(against, ratio.ratio if ratio else None, slower),
        number(share_text(share), share),
    ]


def _state(entry: Entry) -> Html:
    words = _WORDS.get(entry.level, entry.level)
    if entry.record.status != "ok":
        words = entry.record.status
    elif entry.level == "wrong":
        states = {each.result.status for each in entry.standings} - {"timed", "skipped"}
        words = ", ".join(sorted(states))
    return tag("span", words, class_=f"badge {entry.level}")
