"""The roofline of one pass: measured ceilings, and how near each candidate and kernel comes.

A candidate stands at the least bytes and operations that any program needs, so the distance to
the roof is all that it could still gain; a kernel stands at its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from fusewright.bench.record import Pass, Rates, Record, Result, StepTime
from fusewright.page.drawing import Canvas, Chart
from fusewright.page.figures import (
    bytes_text,
    count_text,
    in_words,
    rate_text,
    share_text,
    shortened,
    time_text,
    title_of,
)
from fusewright.page.look import MARKERS, OURS, Palette, series_of
from fusewright.page.standing import precision_text

_HEIGHT_IN = 4.3
# Where work without counted operations stands: far down the slope, at its bytes per second.
_LEAST_INTENSITY = 0.05
_LABEL = 9.0
_ASIDE_IN = 0.1


@dataclass(frozen=True)
class Spot:
    """A place in the plot."""

    intensity: float
    rate: float


def roofline_chart(record: Record, found: Pass, palette: Palette) -> Chart | None:
    """None without measured rates, or where nothing was timed."""
    rates = record.rates
    if rates is None or rates.copy_bytes_per_s <= 0 or not _product_rates(rates):
        return None
    canvas = Canvas(palette, _HEIGHT_IN)
    canvas.axes.set_xscale("log")
    canvas.axes.set_yscale("log")
    timed = sum(each.timing is not None for each in found.results)
    spots = [
        _candidate(canvas, record, found, each, place - (timed - 1) / 2)
        for place, each in enumerate(each for each in found.results if each.timing)
    ]
    for result in found.results:
        spots += [_step(canvas, each) for each in result.steps]
    seen = [each for each in spots if each]
    if not seen:
        return None
    _ceilings(canvas, rates, seen)
    _format(canvas)
    canvas.axes.set_title(title_of(found.name), color=palette.ink)
    canvas.label_axes("operations per byte moved (log)", "operations per second (log)")
    canvas.legend_below(2)
    return canvas.chart(f"roofline-{found.name}", f"Roofline, {in_words(found.name)}")


def _product_rates(rates: Rates) -> dict[str, float]:
    return {kind: rate for kind, rate in rates.products.items() if rate > 0}


def _spot(size: int, operations: int, time_us: float | None) -> Spot | None:
    if not time_us or time_us <= 0 or size <= 0:
        return None
    intensity = max(operations / size, _LEAST_INTENSITY)
    return Spot(intensity, max(operations, intensity * size) / time_us * 1e6)


def _candidate(
    canvas: Canvas, record: Record, found: Pass, result: Result, aside: float
) -> Spot | None:
    """All candidates have one intensity: each stands a little aside, so that all are seen."""
    if found.floor is None or result.timing is None:
        return None
    spot = _spot(found.floor.bytes, found.floor.operations, result.timing.median_us)
    if spot is None:
        return None
    name, kind = result.candidate, precision_text(result.precision)
    (artist,) = canvas.axes.plot(
        [spot.intensity],
        [spot.rate],
        MARKERS.get(result.precision, "X"),
        color=canvas.palette.series[series_of(record, name)],
        markeredgecolor=canvas.palette.paper,
        markersize=9,
        zorder=4,
        label=f"{shortened(name, 20)} · {kind}",
        transform=canvas.axes.transData
        + ScaledTranslation(aside * _ASIDE_IN, 0.0, canvas.figure.dpi_scale_trans),
    )
    floor = found.floor
    rows = (
        f"{name} · {kind}",
        f"time {time_text(result.timing.median_us)}",
        f"least bytes {bytes_text(floor.bytes)}, {_operations(floor.operations)}",
        f"achieved {rate_text(floor.bytes / result.timing.median_us * 1e6, 'B')}, "
        f"{rate_text(floor.operations / result.timing.median_us * 1e6, 'op')}",
        f"share of the roof {share_text(result.floor_share)}",
    )
    canvas.mark(artist, "\n".join(rows))
    return spot


def _step(canvas: Canvas, step: StepTime) -> Spot | None:
    spot = _spot(step.bytes, step.operations, step.time_us)
    if spot is None:
        return None
    seen = canvas.axes.get_legend_handles_labels()[1]
    label = "a call in our plan" if step.kind == "call" else "a kernel of ours"
    colour = canvas.palette.warn if step.kind == "call" else canvas.palette.series[OURS]
    (artist,) = canvas.axes.plot(
        [spot.intensity],
        [spot.rate],
        "D",
        color=canvas.palette.paper,
        markeredgecolor=colour,
        markeredgewidth=1.8,
        markersize=7,
        zorder=3,
        label="" if label in seen else label,
    )
    rows = (
        f"{step.step} ({step.kind}, {step.graph})",
        f"time {time_text(step.time_us)}",
        f"{bytes_text(step.bytes)}, {_operations(step.operations)}",
        f"achieved {rate_text(step.bytes_per_s, 'B')}, {rate_text(step.operations_per_s, 'op')}",
        f"share of the roof {share_text(step.roof_share)}",
    )
    canvas.mark(artist, "\n".join(rows))
    return spot


def _operations(count: int) -> str:
    return f"{count_text(count)} operations" if count else "no products counted"


def _ceilings(canvas: Canvas, rates: Rates, spots: list[Spot]) -> None:
    """The slope of memory up to the highest ceiling, and one level line for each class."""
    products = _product_rates(rates)
    top, copying = max(products.values()), rates.copy_bytes_per_s
    left = min(*(each.intensity for each in spots), 1.0) / 3
    right = max(*(each.intensity for each in spots), top / copying) * 12
    bottom = min(*(each.rate for each in spots), left * copying * 2) / 2
    axes, palette = canvas.axes, canvas.palette
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, max(top, *(each.rate for each in spots)) * 2.2)
    (slope,) = axes.plot([left, top / copying], [left * copying, top], color=palette.soft)
    canvas.mark(slope, f"memory: {rate_text(copying, 'B')} copied, measured in this run")
    # High up the slope, where there is room to its left.
    upper = left * (top / copying / left) ** 0.8
    canvas.axes.annotate(
        f"memory {rate_text(copying, 'B')}",
        (upper, upper * copying),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=_LABEL,
        color=palette.soft,
    )
    last = math.inf
    for kind, rate in sorted(products.items(), key=lambda each: -each[1]):
        (line,) = axes.plot([rate / copying, right], [rate, rate], color=palette.soft)
        canvas.mark(line, f"{precision_text(kind)} products: {rate_text(rate, 'op')}, measured")
        if rate < last * 0.6:  # Lines that lie on one another share the label of the first.
            same = [each for each, other in products.items() if rate >= other > rate * 0.6]
            names = "/".join(map(precision_text, same))
            # Below its line where the next one above is near.
            _label(canvas, f"{names} {rate_text(rate, 'op')}", (right, rate), rate > last / 3)
            last = rate


def _label(canvas: Canvas, text: str, place: tuple[float, float], under: bool) -> None:
    canvas.axes.annotate(
        text,
        place,
        xytext=(0, -2 if under else 2),
        textcoords="offset points",
        ha="right",
        va="top" if under else "bottom",
        fontsize=_LABEL,
        color=canvas.palette.soft,
    )


def _format(canvas: Canvas) -> None:
    axes = canvas.axes
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=canvas.palette.grid, linewidth=0.8)
