"""The spread of speedups over many problems: one row per baseline, one dot per problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.bench.record import BASELINES, Ratio, Record, Result, Spread
from fusewright.page.bars import drawable, ratio_axis, ticks_between, write_heading
from fusewright.page.drawing import Canvas, Chart
from fusewright.page.figures import ratio_text
from fusewright.page.look import MARKERS, Palette
from fusewright.page.standing import main_subject, precision_text

_ROW_IN = 0.95
_BINS = 44
_STACK = 0.075
_MOST_STACK = 5


@dataclass(frozen=True)
class Dot:
    """One problem against one baseline."""

    problem: str
    result: Result
    ratio: Ratio


def strip_chart(
    records: Sequence[Record], spreads: Sequence[Spread], pass_name: str, palette: Palette
) -> Chart | None:
    """The main candidate of every problem, or None if no problem has a ratio in this pass."""
    rows = {each: dots_of(records, pass_name, each) for each in BASELINES}
    rows = {each: dots for each, dots in rows.items() if dots}
    if not rows:
        return None
    canvas = Canvas(palette, 0.9 + _ROW_IN * len(rows))
    values = [math.log2(dot.ratio.ratio) for dots in rows.values() for dot in dots]
    low, high = min(*values, 0.0) - 0.1, max(*values, 0.0) + 0.1
    ratio_axis(canvas, low, high, ticks_between(2**low, 2**high))
    canvas.axes.set_ylim(len(rows) - 0.4, -0.55)
    for row, (baseline, dots) in enumerate(rows.items()):
        _dots(canvas, row, dots, (high - low) / _BINS)
        _summary(canvas, row, _spread_of(spreads, pass_name, baseline, records), baseline)
    return canvas.chart("spread", "Spread of speedups", pass_name, ": one mark per problem")


def dots_of(records: Sequence[Record], pass_name: str, baseline: str) -> list[Dot]:
    """One dot per problem, from slow to fast."""
    found = [
        Dot(record.problem.name, result, ratio)
        for record in records
        for each, result in record.results
        if each.name == pass_name and result.candidate == main_subject(record)
        for ratio in result.ratios
        if ratio.baseline == baseline and drawable(ratio)
    ]
    return sorted(found, key=lambda dot: (dot.ratio.ratio, dot.problem))


def _spread_of(
    spreads: Sequence[Spread], pass_name: str, baseline: str, records: Sequence[Record]
) -> Spread | None:
    names = {main_subject(each) for each in records}
    fitting = [
        each
        for each in spreads
        if (each.pass_name, each.baseline) == (pass_name, baseline)
        and (each.candidate in names or each.candidate == "foreign")
    ]
    return max(fitting, key=lambda each: each.candidate != "foreign", default=None)


def _dots(canvas: Canvas, row: int, dots: Sequence[Dot], bin_width: float) -> None:
    stacked: Counter[int] = Counter()
    for dot in dots:
        x = math.log2(dot.ratio.ratio)
        height = stacked[int(x // bin_width)]
        stacked[int(x // bin_width)] += 1
        fine = dot.result.precision in ("fp32", "fp64")
        slower = dot.ratio.high < 1
        colour = canvas.palette.bad if slower else canvas.palette.series[0]
        canvas.dot(
            x,
            row + 0.32 - _STACK * (height % (_MOST_STACK + 1)),
            MARKERS.get(dot.result.precision, "X"),
            f"{dot.problem} · {precision_text(dot.result.precision)}",
            f"{ratio_text(dot.ratio.ratio)} vs {dot.ratio.baseline}",
            f"95 % interval {dot.ratio.low:.3f}× to {dot.ratio.high:.3f}×",
            color=colour if fine else canvas.palette.paper,
            markeredgecolor=colour,
            alpha=0.85,
            markersize=5.5,
        )


def _summary(canvas: Canvas, row: int, spread: Spread | None, baseline: str) -> None:
    text = f"vs {baseline}"
    if spread:
        mean = math.log2(spread.geometric_mean)
        ends = [row - 0.16, row + 0.42]
        (line,) = canvas.axes.plot([mean, mean], ends, color=canvas.palette.ink, linewidth=2.2)
        canvas.mark(line, f"geometric mean {ratio_text(spread.geometric_mean)} vs {baseline}")
        text += f": geometric mean {ratio_text(spread.geometric_mean)}, "
        text += f"median {ratio_text(spread.median)}"
    write_heading(canvas, text, row - 0.32, fontsize=10)
