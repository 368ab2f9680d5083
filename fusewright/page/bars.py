"""The chart of speedups in one pass: a bar per candidate and baseline, from 1× to the ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.text import Annotation

from fusewright.bench.record import Pass, Ratio, Record, Result
from fusewright.page.drawing import Canvas, Chart
from fusewright.page.figures import ratio_text, shortened, time_text
from fusewright.page.look import Palette, series_of
from fusewright.page.standing import find, precision_text
from fusewright.verify.classes import coarseness

_ROW_IN = 0.25
_POWERS = tuple(2.0**power for power in range(1, 11))
# Ticks above 1, from the finest choice to the coarsest. Their inverses are the ticks below 1.
_STEPS = (
    (1.1, 1.2, 1.3, 1.4, 1.5, 1.75, *_POWERS),
    (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, *_POWERS[2:]),
    (1.5, 2.0, 3.0, 4.0, 6.0, *_POWERS[2:]),
    _POWERS,
    _POWERS[1::2],
)
# The least distance between two ticks, as a share of the axis: their labels need it.
_LEAST_GAP = 0.12


@dataclass(frozen=True)
class Line:
    """A row of the chart: a heading if `ratio` is None, otherwise a bar."""

    text: str
    result: Result
    ratio: Ratio | None = None


def speed_chart(record: Record, found: Pass, palette: Palette) -> Chart | None:
    """The chart, or None if no candidate has a ratio that can be drawn."""
    ordered = sorted(found.results, key=lambda each: each.candidate not in record.subjects)
    lines = [line for each in ordered for line in _lines(record, each)]
    if not any(line.ratio for line in lines):
        return None
    canvas = Canvas(palette, 0.85 + _ROW_IN * len(lines))
    _scale(canvas, [line.ratio for line in lines if line.ratio])
    for row, line in enumerate(lines):
        if line.ratio is None:
            _heading(canvas, row, line)
        else:
            colour = palette.series[series_of(record, line.result.candidate)]
            baseline = find(found.results, line.ratio.baseline)
            _bar(canvas, row, line, line.ratio, baseline, colour)
    canvas.axes.set_ylim(len(lines) - 0.4, -0.6)
    return canvas.chart("speedup", "Speedups", found.name)


def _lines(record: Record, result: Result) -> list[Line]:
    """The rows of one result. Baselines are compared with the first baseline only."""
    if result.status == "skipped":
        return []
    subject = result.candidate in record.subjects
    first = record.settings.baselines[:1]
    chosen = [
        each for each in result.ratios if drawable(each) and (subject or each.baseline in first)
    ]
    if not chosen and result.status == "timed":
        return []
    name = shortened(result.candidate, 26)
    if result.status != "timed":
        return [Line(f"{name}: {result.status}, no time", result)]
    heading = Line(f"{name} · {precision_text(result.precision)}", result)
    return [heading, *(Line(each.baseline, result, each) for each in chosen)]


def drawable(ratio: Ratio) -> bool:
    """Whether a log axis can show the ratio's interval."""
    return 0 < ratio.low <= ratio.high < math.inf


def _heading(canvas: Canvas, row: int, line: Line) -> None:
    wrong = line.result.status != "timed"
    colour = canvas.palette.bad if wrong else canvas.palette.ink
    text = write_heading(canvas, line.text, row + 0.08, color=colour, fontsize=10.5)
    if wrong:
        canvas.mark(text, f"{line.result.candidate}: {line.result.status}\n{line.result.note}")


def write_heading(canvas: Canvas, text: str, row: float, **style: Any) -> Annotation:
    """Write a bold text at the left edge; its background keeps the line at 1× out of it."""
    paper = {"facecolor": canvas.palette.paper, "edgecolor": "none", "pad": 1.5}
    where: Any = {"xycoords": ("axes fraction", "data"), "va": "center", "bbox": paper}
    return canvas.write(text, (0.0, row), fontweight="bold", **where, **style)


def _bar(
    canvas: Canvas, row: int, line: Line, ratio: Ratio, baseline: Result | None, colour: str
) -> None:
    precision = baseline.precision if baseline else ""
    uneven = coarseness(precision) != coarseness(line.result.precision)
    bar = canvas.axes.barh(
        row,
        math.log2(ratio.ratio),
        height=0.72,
        color=colour,
        alpha=0.45 if uneven else 0.85,
        hatch="///" if uneven else None,
        edgecolor=canvas.palette.paper if uneven else colour,
        linewidth=0,
    )
    low, high = math.log2(ratio.low), math.log2(ratio.high)
    whisker: Any = {"color": canvas.palette.ink, "linewidth": 1.1, "markeredgewidth": 1.1}
    canvas.axes.plot([low, high], [row, row], "|-", markersize=6, **whisker)
    against = f"{line.text} ({precision_text(precision)})" if uneven else line.text
    text = f"{ratio_text(ratio.ratio)} vs {against}"
    canvas.write(text, (max(high, 0.0), row), (5, 0), va="center")
    canvas.mark(bar.patches[0], _tip(line, ratio, baseline, uneven))


def _tip(line: Line, ratio: Ratio, baseline: Result | None, uneven: bool) -> str:
    result = line.result
    rows = [
        f"{result.candidate} against {ratio.baseline}",
        f"{ratio_text(ratio.ratio)}, 95 % interval {ratio.low:.3f}× to {ratio.high:.3f}×",
    ]
    if result.timing and baseline and baseline.timing:
        medians = (result.timing.median_us, baseline.timing.median_us)
        rows.append(" against ".join(map(time_text, medians)))
    if uneven and baseline:
        rows.append(
            f"unequal precision: {precision_text(result.precision)} against "
            f"{precision_text(baseline.precision)}"
        )
    return "\n".join(rows)


def _scale(canvas: Canvas, ratios: Sequence[Ratio]) -> None:
    """All ratios, with room for the labels on the right."""
    low = min(0.0, *(math.log2(each.low) for each in ratios))
    high = max(0.0, *(math.log2(each.high) for each in ratios))
    width = max(high - low, 0.25)
    ticks = ticks_between(2**low, 2 ** (high + 0.4 * width))
    ratio_axis(canvas, low - 0.03 * width, high + 0.85 * width, ticks)


def ratio_axis(canvas: Canvas, low: float, high: float, ticks: Sequence[float]) -> None:
    """A linear axis of log2 ratios, with a line at 1× and no axis for the rows."""
    axes = canvas.axes
    axes.set_xlim(low, high)
    axes.set_xticks([math.log2(each) for each in ticks], list(map(tick_text, ticks)))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=canvas.palette.grid, linewidth=0.8)
    axes.axvline(0.0, color=canvas.palette.ink, linewidth=1.2)
    canvas.label_axes("times as fast as the baseline: right of 1× is faster (log)")


def ticks_between(low: float, high: float) -> list[float]:
    """Round ratios from low to high, 1 among them, few enough to fit side by side."""
    for steps in _STEPS:
        both = sorted({1.0, *steps, *(1 / each for each in steps)})
        fitting = [each for each in both if low * 0.999 <= each <= high * 1.001]
        gaps = [math.log2(right / left) for left, right in pairwise(fitting)]
        if min(gaps, default=math.inf) >= _LEAST_GAP * math.log2(high / low):
            break
    return fitting


def tick_text(ratio: float) -> str:
    """0.67×, 1×, 1.25×."""
    return f"{ratio:.2f}".rstrip("0").rstrip(".") + "×"
