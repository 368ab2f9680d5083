"""The chart of error against time for one pass. The marker's shape shows the precision class.

A candidate without a time (a wrong one) is drawn in its own lane on the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from fusewright.bench.record import Pass, Record, Result, ValueCheck
from fusewright.page.drawing import Canvas, Chart
from fusewright.page.figures import error_text, shortened, time_text
from fusewright.page.look import MARKERS, Palette, series_of
from fusewright.page.standing import precision_text

_HEIGHT_IN = 4.0
_LEAST_ERROR = 1e-17
_LANE = 0.93
_MOST_TICKS = 6
# Two marks, or their labels, touch when they are closer than these shares of the plot's size.
_MARK_ROOM = (0.035, 0.055)
_LABEL_ROOM = (0.13, 0.07)
_SIZE, _RING, _MOST_RINGS = 8.5, 2.3, 4
# Leading digits of the ticks, from the finest choice to the coarsest.
_DIGITS = (
    tuple(tenth / 10 for tenth in range(10, 100)),
    (1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9),
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 5),
    (1, 3),
    (1,),
)
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Spot:
    """A candidate's mark. `x` and `y` are shares of the plot's width and height."""

    result: Result
    worst: ValueCheck
    state: str
    x: float
    y: float

    def touches(self, other: Spot, room: tuple[float, float]) -> bool:
        return abs(self.x - other.x) < room[0] and abs(self.y - other.y) < room[1]


def accuracy_chart(record: Record, found: Pass, palette: Palette) -> Chart | None:
    """The chart, or None if no candidate was both timed and checked."""
    rows = [(each, worst) for each in found.results if (worst := worst_check(each))]
    timed = [us for each, _ in rows if (us := _time_us(each))]
    if not timed:
        return None
    canvas = Canvas(palette, _HEIGHT_IN)
    finite = [worst.error for _, worst in rows if math.isfinite(worst.error)]
    top = max((_clamped(each) for each in finite), default=1.0) * 10
    lane = any(_time_us(each) is None for each, _ in rows)
    _scales(canvas, timed, [*map(_clamped, finite), top], lane=lane)
    spots = [_spot(canvas, result, worst, top) for result, worst in rows]
    for index, each in enumerate(spots):
        _mark(canvas, record, each, ring_size(each, spots[index + 1 :]))
    for each in labelled_spots(spots):
        colour = palette.bad if _time_us(each.result) is None else palette.warn
        style = {"xycoords": "axes fraction", "ha": "center", "fontweight": "bold"}
        canvas.write(each.state, (each.x, each.y), (0, 10), color=colour, **style)
    canvas.label_axes("median time, µs (log)", "worst error against float64 (log)")
    canvas.legend_below(2)
    return canvas.chart("error", "Error against time", found.name)


def worst_check(result: Result) -> ValueCheck | None:
    """The check with the largest error. An error that is not finite counts as the largest."""
    return max(
        result.checks,
        key=lambda each: each.error if math.isfinite(each.error) else math.inf,
        default=None,
    )


def _time_us(result: Result) -> float | None:
    """The median, or None if a log axis cannot show it."""
    us = result.timing.median_us if result.timing else 0.0
    return us if 0 < us < math.inf else None


def _clamped(error: float) -> float:
    return max(error, _LEAST_ERROR)


def _scales(canvas: Canvas, times: list[float], errors: list[float], *, lane: bool) -> None:
    axes = canvas.axes
    low, high = math.log10(min(times)), math.log10(max(times))
    room = max(high - low, 0.3) * 0.15
    width = high - low + 2 * room
    right = (high + room) + (width * 0.2 if lane else 0.0)
    axes.set_xlim(low - room, right)
    axes.set_yscale("log")
    axes.set_ylim(min(errors) / 5, max(errors) * 2)
    ticks = round_between(10 ** (low - room), 10 ** (high + room))
    axes.set_xticks([math.log10(each) for each in ticks], [f"{each:g}" for each in ticks])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_text(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=canvas.palette.grid, linewidth=0.8)
    if lane:
        edge = high + room
        axes.axvspan(edge, right, color=canvas.palette.bad, alpha=0.08, linewidth=0)
        style: Any = {"xycoords": ("data", "axes fraction"), "ha": "center"}
        canvas.write("no time", ((edge + right) / 2, 0.02), color=canvas.palette.bad, **style)


def round_between(low: float, high: float) -> list[float]:
    """Round numbers from low to high: as many as fit side by side, and at least one."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in _DIGITS:
        found = [float(f"{digit}e{power}") for power in decades for digit in digits]
        fitting = [each for each in found if low <= each <= high]
        if fitting and (len(fitting) <= _MOST_TICKS or digits is _DIGITS[-1]):
            break
    while len(fitting) > _MOST_TICKS:
        fitting = fitting[::2]
    return fitting


def power_text(value: float) -> str:
    """The power of ten with a superscript exponent: 10⁻⁷."""
    power = round(math.log10(value)) if value > 0 else 0
    return "1" if not power else "10" + str(power).translate(_RAISED)


def _spot(canvas: Canvas, result: Result, worst: ValueCheck, top: float) -> Spot:
    left, right = canvas.axes.get_xlim()
    low, high = map(math.log10, canvas.axes.get_ylim())
    time_us = _time_us(result)
    state = precision_text(result.precision) if time_us else result.status.upper()
    error = _clamped(worst.error) if math.isfinite(worst.error) else top
    x = (math.log10(time_us) - left) / (right - left) if time_us else _LANE
    return Spot(result, worst, state, x, (math.log10(error) - low) / (high - low))


def ring_size(spot: Spot, later: Sequence[Spot]) -> float:
    """The mark's size: one ring larger for each later mark that covers it, so all stay visible."""
    over = sum(each.touches(spot, _MARK_ROOM) for each in later)
    return _SIZE + _RING * min(over, _MOST_RINGS)


def labelled_spots(spots: Sequence[Spot]) -> list[Spot]:
    """The spots whose state is written beside the mark: one of several close ones that agree."""
    chosen: list[Spot] = []
    for each in spots:
        near = (other for other in chosen if other.touches(each, _LABEL_ROOM))
        if each.state != "fp32" and not any(other.state == each.state for other in near):
            chosen.append(each)
    return chosen


def _mark(canvas: Canvas, record: Record, spot: Spot, size: float) -> None:
    result, worst = spot.result, spot.worst
    time_us = _time_us(result)
    canvas.dot(
        spot.x,
        spot.y,
        MARKERS.get(result.precision if time_us else "", "X"),
        f"{result.candidate} · {spot.state}",
        f"time {time_text(time_us)}" if time_us else f"no time: {result.note}",
        f"worst error {error_text(worst.error)} at {worst.name} ({worst.when} timing)",
        f"eager's error there {error_text(worst.eager_error)}",
        color=canvas.palette.series[series_of(record, result.candidate)],
        markeredgecolor=canvas.palette.paper if time_us else canvas.palette.bad,
        markersize=size,
        zorder=3,
        linestyle="none",
        label=f"{shortened(result.candidate, 20)} · {spot.state}",
        transform=canvas.axes.transAxes,
    )
