"""How speed-ups spread over many problems: one row per baseline, one dot per problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.bench.record import BASELINES, Ratio, Record, Result, Spread
from fusewright.page.bars import drawable, tick_text, ticks_between
from fusewright.page.drawing import Canvas, Chart
from fusewright.page.figures import in_words, ratio_text, title_of
from fusewright.page.look import MARKERS, Palette
from fusewright.page.standing import find, main_subject, precision_text

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
    """The main candidate of every problem; None where no problem has a ratio in this pass."""
    rows = {each: dots_of(records, pass_name, each) for each in BASELINES}
    rows = {each: dots for each, dots in rows.items() if dots}
    if not rows:
        return None
    canvas = Canvas(palette, 0.9 + _ROW_IN * len(rows))
    values = [math.log2(dot.ratio.ratio) for dots in rows.values() for dot in dots]
    low, high = min(*values, 0.0) - 0.1, max(*values, 0.0) + 0.1
    _scale(canvas, low, high, len(rows))
    for place, (baseline, dots) in enumerate(rows.items()):
        _dots(canvas, place, dots, (high - low) / _BINS)
        _summary(canvas, place, _spread_of(spreads, pass_name, baseline, records), baseline)
    canvas.axes.set_title(f"{title_of(pass_name)}: one mark per problem", color=palette.ink)
    canvas.label_axes("times as fast as the baseline: right of 1× is faster (log)")
    return canvas.chart(f"spread-{pass_name}", f"Spread of speed-ups, {in_words(pass_name)}")


def dots_of(records: Sequence[Record], pass_name: str, baseline: str) -> list[Dot]:
    """From slow to fast."""
    found = []
    for record in records:
        for each in record.passes:
            result = find(each.results, main_subject(record)) if each.name == pass_name else None
            ratios = result.ratios if result else ()
            found += [
                Dot(record.problem.name, result, ratio)
                for ratio in ratios
                if result and ratio.baseline == baseline and drawable(ratio)
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


def _dots(canvas: Canvas, place: int, dots: Sequence[Dot], bin_width: float) -> None:
    stacked: dict[int, int] = {}
    for dot in dots:
        x = math.log2(dot.ratio.ratio)
        height = stacked.get(int(x // bin_width), 0)
        stacked[int(x // bin_width)] = height + 1
        fine = dot.result.precision in ("fp32", "fp64")
        slower = dot.ratio.high < 1
        colour = canvas.palette.bad if slower else canvas.palette.series[0]
        (artist,) = canvas.axes.plot(
            [x],
            [place + 0.32 - _STACK * (height % (_MOST_STACK + 1))],
            MARKERS.get(dot.result.precision, "X"),
            color=colour if fine else canvas.palette.paper,
            markeredgecolor=colour,
            alpha=0.85,
            markersize=5.5,
        )
        rows = (
            f"{dot.problem} · {precision_text(dot.result.precision)}",
            f"{ratio_text(dot.ratio.ratio)} vs {dot.ratio.baseline}",
            f"95 % interval {dot.ratio.low:.3f}× to {dot.ratio.high:.3f}×",
        )
        canvas.mark(artist, "\n".join(rows))


def _summary(canvas: Canvas, place: int, spread: Spread | None, baseline: str) -> None:
    text = f"vs {baseline}"
    if spread:
        mean = math.log2(spread.geometric_mean)
        ends = [place - 0.16, place + 0.42]
        (line,) = canvas.axes.plot([mean, mean], ends, color=canvas.palette.ink, linewidth=2.2)
        canvas.mark(line, f"geometric mean {ratio_text(spread.geometric_mean)} vs {baseline}")
        text += f": geometric mean {ratio_text(spread.geometric_mean)}, "
        text += f"median {ratio_text(spread.median)}"
    canvas.axes.annotate(
        text,
        (0.0, place - 0.32),
        xycoords=("axes fraction", "data"),
        va="center",
        fontweight="bold",
        fontsize=10,
        color=canvas.palette.ink,
        bbox={"facecolor": canvas.palette.paper, "edgecolor": "none", "pad": 1.5},
    )


def _scale(canvas: Canvas, low: float, high: float, rows: int) -> None:
    axes = canvas.axes
    axes.set_xlim(low, high)
    ticks = ticks_between(2**low, 2**high)
    axes.set_xticks([math.log2(each) for each in ticks], list(map(tick_text, ticks)))
    axes.set_ylim(rows - 0.4, -0.55)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=canvas.palette.grid, linewidth=0.8)
    axes.axvline(0.0, color=canvas.palette.ink, linewidth=1.2)
