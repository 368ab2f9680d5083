"""One problem's part of the page, whole or brief, and the charts that belong to it."""

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
    "the narrower one does less work.",
    "roofline": "Ceilings were measured in this run. A candidate stands at the least bytes and "
    "operations that any program needs, set a little aside so that all are seen; a kernel stands "
    "at its own.",
    "error": "Lower left is better. Only plain fp32 stands without a word beside its mark; marks "
    "that touch share theirs.",
}
_HEADINGS = {"speedup": "Speed-ups", "roofline": "Roofline", "error": "Error against time"}


def problem_charts(record: Record, palette: Palette) -> Iterator[Chart]:
    """The charts of one problem, kind by kind, one for each pass."""
    with settings():
        for draw in (speed_chart, roofline_chart, accuracy_chart):
            for found in record.passes:
                chart = draw(record, found, palette)
                if chart:
                    yield chart


def verdicts(record: Record) -> Html:
    """The sentence on the main candidate, and one for each other that is no baseline."""
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
    """Charts, plan and every table; `prefix` keeps the ids of two problems apart."""
    parts = [_charts(record, prefix)]
    if record.passes:
        parts.append(_part("Times", joined(times_table(record, each) for each in record.passes)))
    parts.append(_part("Plan", plan_picture(record)))
    parts.append(_part("Kernels", kernels_table(record)))
    most = _MOST_CHECKS[alone]
    parts.append(_part("Checks", joined(checks_table(each, most) for each in record.passes)))
    if record.candidates:
        parts.append(_part("What else it costs", costs_table(record)))
    if alone:
        parts.append(_part("How it was measured", surroundings((record,))))
    return joined(parts)


def brief(record: Record) -> Html:
    """The times alone, for a page that has no room for more."""
    words = "Left out for size: charts, plan and checks. A report of this problem alone has them."
    return joined(
        (*(times_table(record, each) for each in record.passes), tag("p", tag("small", words)))
    )


def failure(record: Record) -> Html:
    """What a problem without results left behind."""
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
