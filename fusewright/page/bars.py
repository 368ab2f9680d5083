"""Speed-ups of one pass: a bar for each candidate and baseline, from 1× to the measured ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fusewright.bench.record import Pass, Ratio, Record, Result
from fusewright.page.drawing import Canvas, Chart
from fusewright.page.figures import in_words, ratio_text, shortened, time_text, title_of
from fusewright.page.look import Palette, series_of
from fusewright.page.standing import coarseness, find, precision_text

_ROW_IN = 0.25
_POWERS = tuple(2.0**power for power in range(1, 11))
# From fine to coarse: 1 and what lies above it; what lies below mirrors it.
_STEPS = (
    (1.1, 1.2, 1.3, 1.4, 1.5, 1.75, *_POWERS),
    (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, *_POWERS[2:]),
    (1.5, 2.0, 3.0, 4.0, 6.0, *_POWERS[2:]),
    _POWERS,
    _POWERS[1::2],
)
# Of the whole axis, between two ticks with their labels.
_LEAST_GAP = 0.12


@dataclass(frozen=True)
class Line:
    """A row of the chart: a heading where `ratio` is None, otherwise a bar."""

    text: str
    result: Result
    ratio: Ratio | None = None


def speed_chart(record: Record, found: Pass, palette: Palette) -> Chart | None:
    """None where nothing has a ratio and nothing is wrong."""
    ordered = sorted(found.results, key=lambda each: each.candidate not in record.subjects)
    lines = [line for each in ordered for line in _lines(record, each)]
    if not any(line.ratio for line in lines):
        return None
    canvas = Canvas(palette, 0.85 + _ROW_IN * len(lines))
    _scale(canvas, [line.ratio for line in lines if line.ratio])
    for place, line in enumerate(lines):
        if line.ratio is None:
            _heading(canvas, place, line)
        else:
            _bar(canvas, place, line, line.ratio, _Shown(record, found))
    canvas.axes.set_ylim(len(lines) - 0.4, -0.6)
    canvas.axes.set_title(title_of(found.name), color=palette.ink)
    canvas.label_axes("times as fast as the baseline: right of 1× is faster (log)")
    return canvas.chart(f"speedup-{found.name}", f"Speed-ups, {in_words(found.name)}")


@dataclass(frozen=True)
class _Shown:
    record: Record
    found: Pass


def _lines(record: Record, result: Result) -> list[Line]:
    """Subjects against every baseline, baselines against the first one only."""
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
    """Whether a log axis has a place for it."""
    return 0 < ratio.low <= ratio.high < math.inf


def _heading(canvas: Canvas, place: int, line: Line) -> None:
    wrong = line.result.status != "timed"
    text = canvas.axes.annotate(
        line.text,
        (0.0, place + 0.08),
        xycoords=("axes fraction", "data"),
        va="center",
        fontweight="bold",
        color=canvas.palette.bad if wrong else canvas.palette.ink,
        # The line at 1× does not run through the words.
        bbox={"facecolor": canvas.palette.paper, "edgecolor": "none", "pad": 1.5},
    )
    if wrong:
        canvas.mark(text, f"{line.result.candidate}: {line.result.status}\n{line.result.note}")


def _bar(canvas: Canvas, place: int, line: Line, ratio: Ratio, shown: _Shown) -> None:
    theirs = find(shown.found.results, ratio.baseline)
    precision = theirs.precision if theirs else ""
    uneven = coarseness(precision) != coarseness(line.result.precision)
    colour = canvas.palette.series[series_of(shown.record, line.result.candidate)]
    bar = canvas.axes.barh(
        place,
        math.log2(ratio.ratio),
        height=0.72,
        color=colour,
        alpha=0.45 if uneven else 0.85,
        hatch="///" if uneven else None,
        edgecolor=canvas.palette.paper if uneven else colour,
        linewidth=0,
    )
    low, high = math.log2(ratio.low), math.log2(ratio.high)
    canvas.axes.plot([low, high], [place, place], color=canvas.palette.ink, linewidth=1.1)
    canvas.axes.plot(
        [low, high],
        [place, place],
        "|",
        color=canvas.palette.ink,
        markersize=6,
        markeredgewidth=1.1,
    )
    against = f"{line.text} ({precision_text(precision)})" if uneven else line.text
    canvas.axes.annotate(
        f"{ratio_text(ratio.ratio)} vs {against}",
        (max(high, 0.0), place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        color=canvas.palette.ink,
    )
    canvas.mark(bar.patches[0], _tip(line, ratio, theirs, uneven))


def _tip(line: Line, ratio: Ratio, theirs: Result | None, uneven: bool) -> str:
    mine = line.result
    rows = [
        f"{mine.candidate} against {ratio.baseline}",
        f"{ratio_text(ratio.ratio)}, 95 % interval {ratio.low:.3f}× to {ratio.high:.3f}×",
    ]
    if mine.timing and theirs and theirs.timing:
        medians = (mine.timing.median_us, theirs.timing.median_us)
        rows.append(" against ".join(map(time_text, medians)))
    if uneven and theirs:
        rows.append(
            f"unequal precision: {precision_text(mine.precision)} against "
            f"{precision_text(theirs.precision)}"
        )
    return "\n".join(rows)


def _scale(canvas: Canvas, ratios: Sequence[Ratio]) -> None:
    """A log axis in powers of two, laid out as a linear one, with room for the labels."""
    low = min(math.log2(each.low) for each in ratios)
    high = max(math.log2(each.high) for each in ratios)
    low, high = min(low, 0.0), max(high, 0.0)
    width = max(high - low, 0.25)
    canvas.axes.set_xlim(low - 0.03 * width, high + 0.85 * width)
    ticks = ticks_between(2**low, 2 ** (high + 0.4 * width))
    canvas.axes.set_xticks([math.log2(each) for each in ticks], list(map(tick_text, ticks)))
    canvas.axes.set_yticks([])
    canvas.axes.spines["left"].set_visible(False)
    canvas.axes.grid(axis="x", color=canvas.palette.grid, linewidth=0.8)
    canvas.axes.axvline(0.0, color=canvas.palette.ink, linewidth=1.2)


def ticks_between(low: float, high: float) -> list[float]:
    """Round ratios from low to high, 1 among them, few enough to stand side by side."""
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
