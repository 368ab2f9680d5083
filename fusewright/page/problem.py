"""One problem's section of the page, full or brief, and its charts."""

from __future__ import annotations

from collections.abc import Iterator

from fusewright.bench.record import Record
from fusewright.page.accuracy import accuracy_chart
from fusewright.page.bars import speed_chart
from fusewright.page.drawing import Chart, settings, svg
from fusewright.page.figures import count_text, seconds_text
from fusewright.page.look import STAND_IN, Palette
from fusewright.page.markup import Html, joined, tag
from fusewright.page.plan import plan_picture
from fusewright.page.roofline import roofline_chart
from fusewright.page.standing import level, main_subject, sentence
from fusewright.page.surroundings import surroundings
from fusewright.page.tables import checks_table, costs_table, kernels_table, times_table

_MOST_CHECKS = {True: 400, False: 25}
_EXPLAINED = {
    "speedup": "Whiskers are 95 % confidence intervals. Hatched bars compare unequal precision: "
    "the candidate with the lower precision does less work.",
    "roofline": "Ceilings were measured in this run. A candidate is drawn at the least bytes and "
    "operations that any program needs; a kernel is drawn at its own. Candidates are shifted a "
    "little sideways so that all are visible.",
    "error": "Lower left is better. Marks without a label are plain fp32. Marks that touch share "
    "a label.",
}
_HEADINGS = {"speedup": "Speedups", "roofline": "Roofline", "error": "Error against time"}


def problem_charts(record: Record, palette: Palette) -> Iterator[Chart]:
    """The charts of one problem, kind by kind, one for each pass of the benchmark."""
    with settings():
        for draw in (speed_chart, roofline_chart, accuracy_chart):
            for found in record.passes:
                chart = draw(record, found, palette)
                if chart:
                    yield chart


def verdicts(record: Record) -> Html:
    """One sentence on the main candidate, and one on each other candidate except baselines."""
    subject = main_subject(record)
    lead = f"{subject}: " if subject and record.subjects != ("ours",) else ""
    words = f"{lead}{sentence(record, subject)}"
    first = tag("p", words, class_=f"verdict {level(record, subject)}")
    others = [
        tag("li", tag("b", each), ": ", sentence(record, each), class_=level(record, each))
        for each in record.subjects
        if each != subject and record.status == "ok"
    ]
    return joined((first, tag("ul", *others, class_="others") if others else ""))


def facts_line(record: Record) -> Html:
    problem = record.problem
    parts = [
        record.environment.device if record.environment else record.settings.device,
        ", ".join(problem.inputs),
        f"{count_text(problem.parameters)} parameters" if problem.parameters else "",
        f"{record.settings.mode} mode",
        f"measured in {seconds_text(record.seconds)}" if record.seconds else "",
        problem.path,
    ]
    return tag("p", " · ".join(filter(None, parts)), class_="facts-line")


def whole(record: Record, prefix: str, *, alone: bool) -> Html:
    """Charts, plan and every table. `prefix` makes the problem's ids unique in the page."""
    parts = [_charts(record, prefix)]
    if record.passes:
        parts.append(_part("Times", joined(times_table(record, each) for each in record.passes)))
    parts.append(_part("Plan", plan_picture(record)))
    parts.append(_part("Kernels", kernels_table(record)))
    most = _MOST_CHECKS[alone]
    parts.append(_part("Checks", joined(checks_table(each, most) for each in record.passes)))
    if record.candidates:
        parts.append(_part("Other costs", costs_table(record)))
    if alone:
        parts.append(_part("How it was measured", surroundings((record,))))
    return joined(parts)


def brief(record: Record) -> Html:
    """The times alone, for a page without room for more."""
    words = "Charts, plan and checks are left out to save space. "
    words += "Make a report of this problem alone to see them."
    return joined(
        (*(times_table(record, each) for each in record.passes), tag("p", tag("small", words)))
    )


def failure(record: Record) -> Html:
    """The error text of a problem without results."""
    return tag("pre", record.error, tabindex=0) if record.error else Html("")


def _part(title: str, content: Html) -> Html:
    return tag("section", tag("h3", title), content) if content else Html("")


def _charts(record: Record, prefix: str) -> Html:
    kinds: dict[str, list[Html]] = {}
    for chart in problem_charts(record, STAND_IN):
        kind = chart.name.split("-")[0]
        kinds.setdefault(kind, []).append(tag("figure", svg(chart, f"{prefix}-{chart.name}-")))
    return joined(
        _part(_HEADINGS[kind], joined((tag("p", _EXPLAINED[kind]), _pair(figures))))
        for kind, figures in kinds.items()
    )


def _pair(figures: list[Html]) -> Html:
    return tag("div", *figures, class_="charts")
