"""Error against time for one pass, each candidate's precision class in its marker.

A candidate without a time (a wrong one) stands in a lane of its own at the right.
"""

from __future__ import annotations

import math

from matplotlib.ticker import FuncFormatter, NullLocator

from fusewright.bench.record import Pass, Record, Result, ValueCheck
from fusewright.page.drawing import Canvas, Chart
from fusewright.page.figures import error_text, in_words, shortened, time_text, title_of
from fusewright.page.look import MARKERS, Palette, series_of
from fusewright.page.standing import precision_text

_HEIGHT_IN = 4.0
_LEAST_ERROR = 1e-17
_LANE = 0.93
_MOST_TICKS = 6
# From fine to coarse.
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


def accuracy_chart(record: Record, found: Pass, palette: Palette) -> Chart | None:
    """None where nothing was timed or nothing checked."""
    rows = [(each, worst) for each in found.results if (worst := worst_check(each))]
    timed = [us for each, _ in rows if (us := _time_us(each))]
    if not timed:
        return None
    canvas = Canvas(palette, _HEIGHT_IN)
    finite = [worst.error for _, worst in rows if math.isfinite(worst.error)]
    top = max((_placed(each) for each in finite), default=1.0) * 10
    lane = any(_time_us(each) is None for each, _ in rows)
    _scales(canvas, timed, [*map(_placed, finite), top], lane=lane)
    for result, worst in rows:
        _mark(canvas, record, result, worst, top)
    canvas.axes.set_title(title_of(found.name), color=palette.ink)
    canvas.label_axes("median time, µs (log)", "worst error against float64 (log)")
    canvas.legend_below(2)
    return canvas.chart(f"error-{found.name}", f"Error against time, {in_words(found.name)}")


def worst_check(result: Result) -> ValueCheck | None:
    """The value with the largest error; one that is not finite is worse than any."""
    return max(
        result.checks,
        key=lambda each: each.error if math.isfinite(each.error) else math.inf,
        default=None,
    )


def _time_us(result: Result) -> float | None:
    """The median where a log axis has a place for it."""
    us = result.timing.median_us if result.timing else 0.0
    return us if 0 < us < math.inf else None


def _placed(error: float) -> float:
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
        axes.annotate(
            "no time",
            ((edge + right) / 2, 0.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=9.5,
            color=canvas.palette.bad,
        )


def round_between(low: float, high: float) -> list[float]:
    """Round numbers from low to high: as many as can stand side by side, and at least one."""
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
    """A power of ten with its exponent raised: 10⁻⁷."""
    power = round(math.log10(value)) if value > 0 else 0
    return "1" if not power else "10" + str(power).translate(_RAISED)


def _mark(canvas: Canvas, record: Record, result: Result, worst: ValueCheck, top: float) -> None:
    left, right = canvas.axes.get_xlim()
    time_us = _time_us(result)
    x = math.log10(time_us) if time_us else left + (right - left) * _LANE
    finite = math.isfinite(worst.error)
    state = precision_text(result.precision) if time_us else result.status.upper()
    (artist,) = canvas.axes.plot(
        [x],
        [_placed(worst.error) if finite else top],
        MARKERS.get(result.precision if time_us else "", "X"),
        color=canvas.palette.series[series_of(record, result.candidate)],
        markeredgecolor=canvas.palette.paper if time_us else canvas.palette.bad,
        markersize=10,
        zorder=3,
        linestyle="none",
        label=f"{shortened(result.candidate, 20)} · {state}",
    )
    if state != "fp32":
        canvas.axes.annotate(
            state,
            (x, _placed(worst.error) if finite else top),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            fontweight="bold",
            color=canvas.palette.warn if time_us else canvas.palette.bad,
        )
    rows = (
        f"{result.candidate} · {state}",
        f"time {time_text(time_us)}" if time_us else f"no time: {result.note}",
        f"worst error {error_text(worst.error)} at {worst.name} ({worst.when} timing)",
        f"eager's error there {error_text(worst.eager_error)}",
    )
    canvas.mark(artist, "\n".join(rows))
