"""The roofline of one pass: measured ceilings, and how close each candidate and kernel comes.

A candidate is drawn at the least bytes and operations that any program needs, so the distance to
the roof is all that it can still gain. A kernel is drawn at its own bytes and operations.
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
    rate_text,
    share_text,
    shortened,
    time_text,
)
from fusewright.page.look import MARKERS, OURS, Palette, series_of
from fusewright.page.standing import precision_text

_HEIGHT_IN = 4.3
# Work without counted operations is drawn far down the slope, at its bytes per second.
_LEAST_INTENSITY = 0.05
_LABEL = 9.0
_SHIFT_IN = 0.1


@dataclass(frozen=True)
class Spot:
    """A point in the plot: operations per byte, operations per second."""

    intensity: float
    rate: float


def roofline_chart(record: Record, found: Pass, palette: Palette) -> Chart | None:
    """The chart, or None if the ceilings were not measured or nothing was timed."""
    rates = record.rates
    if rates is None or rates.copy_bytes_per_s <= 0 or not _matmul_rates(rates):
        return None
    canvas = Canvas(palette, _HEIGHT_IN)
    canvas.axes.set_xscale("log")
    canvas.axes.set_yscale("log")
    timed = sum(each.timing is not None for each in found.results)
    spots = [
        _candidate(canvas, record, found, each, index - (timed - 1) / 2)
        for index, each in enumerate(each for each in found.results if each.timing)
    ]
    for result in found.results:
        spots += [_step(canvas, each) for each in result.steps]
    seen = [each for each in spots if each]
    if not seen:
        return None
    _ceilings(canvas, rates, seen)
    _format(canvas)
    canvas.label_axes("operations per byte moved (log)", "operations per second (log)")
    canvas.legend_below(2)
    return canvas.chart("roofline", "Roofline", found.name)


def _matmul_rates(rates: Rates) -> dict[str, float]:
    return {kind: rate for kind, rate in rates.products.items() if rate > 0}


def _spot(size: int, operations: int, time_us: float | None) -> Spot | None:
    if not time_us or time_us <= 0 or size <= 0:
        return None
    intensity = max(operations / size, _LEAST_INTENSITY)
    return Spot(intensity, max(operations, intensity * size) / time_us * 1e6)


def _candidate(
    canvas: Canvas, record: Record, found: Pass, result: Result, shift: float
) -> Spot | None:
    """All candidates have the same intensity. Each is shifted a little, so that all are visible."""
    if found.floor is None or result.timing is None:
        return None
    spot = _spot(found.floor.bytes, found.floor.operations, result.timing.median_us)
    if spot is None:
        return None
    name, kind = result.candidate, precision_text(result.precision)
    floor, per_s = found.floor, 1e6 / result.timing.median_us
    achieved = (rate_text(floor.bytes * per_s, "B"), rate_text(floor.operations * per_s, "op"))
    canvas.dot(
        spot.intensity,
        spot.rate,
        MARKERS.get(result.precision, "X"),
        f"{name} · {kind}",
        f"time {time_text(result.timing.median_us)}",
        f"least bytes {bytes_text(floor.bytes)}, {_operations(floor.operations)}",
        f"achieved {', '.join(achieved)}",
        f"share of the roof {share_text(result.floor_share)}",
        color=canvas.palette.series[series_of(record, name)],
        markeredgecolor=canvas.palette.paper,
        markersize=9,
        zorder=4,
        label=f"{shortened(name, 20)} · {kind}",
        transform=canvas.axes.transData
        + ScaledTranslation(shift * _SHIFT_IN, 0.0, canvas.figure.dpi_scale_trans),
    )
    return spot


def _step(canvas: Canvas, step: StepTime) -> Spot | None:
    spot = _spot(step.bytes, step.operations, step.time_us)
    if spot is None:
        return None
    seen = canvas.axes.get_legend_handles_labels()[1]
    label = "a PyTorch call of our plan" if step.kind == "call" else "one of our kernels"
    colour = canvas.palette.warn if step.kind == "call" else canvas.palette.series[OURS]
    canvas.dot(
        spot.intensity,
        spot.rate,
        "D",
        f"{step.step} ({step.kind}, {step.graph})",
        f"time {time_text(step.time_us)}",
        f"{bytes_text(step.bytes)}, {_operations(step.operations)}",
        f"achieved {rate_text(step.bytes_per_s, 'B')}, {rate_text(step.operations_per_s, 'op')}",
        f"share of the roof {share_text(step.roof_share)}",
        color=canvas.palette.paper,
        markeredgecolor=colour,
        markeredgewidth=1.8,
        markersize=7,
        zorder=3,
        label="" if label in seen else label,
    )
    return spot


def _operations(count: int) -> str:
    return f"{count_text(count)} operations" if count else "no matmul operations"


def _ceilings(canvas: Canvas, rates: Rates, spots: list[Spot]) -> None:
    """The memory slope up to the highest ceiling, and one ceiling for each precision class."""
    matmuls = _matmul_rates(rates)
    top, copying = max(matmuls.values()), rates.copy_bytes_per_s
    left = min(*(each.intensity for each in spots), 1.0) / 3
    right = max(*(each.intensity for each in spots), top / copying) * 12
    bottom = min(*(each.rate for each in spots), left * copying * 2) / 2
    axes, palette = canvas.axes, canvas.palette
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, max(top, *(each.rate for each in spots)) * 2.2)
    (slope,) = axes.plot([left, top / copying], [left * copying, top], color=palette.soft)
    canvas.mark(slope, f"memory: {rate_text(copying, 'B')} copied, measured in this run")
    # There is room to the left of the upper part of the slope.
    upper = left * (top / copying / left) ** 0.8
    style = {"ha": "right", "fontsize": _LABEL, "color": palette.soft}
    text = f"memory {rate_text(copying, 'B')}"
    canvas.write(text, (upper, upper * copying), (-4, 4), va="bottom", **style)
    last = math.inf
    for kind, rate in sorted(matmuls.items(), key=lambda each: -each[1]):
        (line,) = axes.plot([rate / copying, right], [rate, rate], color=palette.soft)
        canvas.mark(line, f"{precision_text(kind)} matmuls: {rate_text(rate, 'op')}, measured")
        if rate < last * 0.6:  # Ceilings that are close together share one label.
            same = [each for each, other in matmuls.items() if rate >= other > rate * 0.6]
            names = "/".join(map(precision_text, same))
            # The label is below its ceiling if the next higher ceiling is close.
            offset, side = ((0, -2), "top") if rate > last / 3 else ((0, 2), "bottom")
            text = f"{names} {rate_text(rate, 'op')}"
            canvas.write(text, (right, rate), offset, va=side, **style)
            last = rate


def _format(canvas: Canvas) -> None:
    axes = canvas.axes
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=canvas.palette.grid, linewidth=0.8)
