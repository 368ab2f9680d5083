"""The tables of one problem: times, kernels, checks and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusewright.bench.record import (
    BASELINES,
    CandidateFacts,
    Pass,
    Record,
    Result,
    StepTime,
    ValueCheck,
)
from fusewright.page.figures import (
    NONE,
    bytes_text,
    count_text,
    error_text,
    in_words,
    rate_text,
    ratio_text,
    seconds_text,
    share_text,
    time_text,
    title_of,
)
from fusewright.page.look import series_of
from fusewright.page.markup import Html, joined, table, tag
from fusewright.page.standing import find, precision_text

_MOST_KERNELS = 12


def badge(result: Result) -> Html:
    """The precision class, or the status of a result without a time. fp32 has no colour."""
    if result.status != "timed":
        kind = "skip" if result.status == "skipped" else "wrong"
        return tag("span", result.status, class_=f"badge {kind}")
    coarse = result.precision not in ("fp32", "fp64")
    return tag("span", precision_text(result.precision), class_="badge warn" if coarse else "badge")


def candidate_name(record: Record, name: str) -> Html:
    dot = tag("span", class_="dot", style=f"background:var(--s{series_of(record, name)})")
    return joined((dot, name))


def number(text: str, sort: float | None = None, class_: str = "", tip: str = "") -> Html:
    """A right-aligned cell. `sort` is the value by which a sortable table orders it."""
    return tag("td", text, class_=f"n {class_}".strip(), data_sort=sort, data_tip=tip or None)


def times_table(record: Record, found: Pass) -> Html:
    """Every candidate of a pass with its median, interval and ratios."""
    seen = {each.baseline for result in found.results for each in result.ratios}
    baselines = sorted(seen, key=lambda each: BASELINES.index(each) if each in BASELINES else 9)
    heads = ["candidate", "class", "median, 95 %", "minimum", "share of floor"]
    heads += [f"vs {each}" for each in baselines]
    rows = [_time_row(record, each, baselines) for each in found.results]
    floor = found.floor
    words = f"{title_of(found.name)}: {found.rounds} rounds in {seconds_text(found.seconds)}."
    if found.busy_us:
        words += f" The GPU is kept busy for {time_text(found.busy_us)} before each call."
    if floor and floor.floor_us:
        least = f"{bytes_text(floor.bytes)} and {count_text(floor.operations)} matmul operations"
        times = ", ".join(f"{precision_text(k)} {time_text(v)}" for k, v in floor.floor_us.items())
        words += f" At least {least}; floor: {times}."
    if any((each.floor_share or 0.0) > 1.0 for each in found.results):
        words += " Above 100 % of the fp32 floor: tensor cores with fp32's accuracy."
    if any(each.timing and not each.timing.converged for each in found.results):
        words += " Coloured medians: the interval is wider than requested."
    if floor and floor.note:
        words += f" {floor.note}"
    return joined((table(heads, rows, caption=words, words=2), _notes(found)))


def _notes(found: Pass) -> Html:
    notes = [(each.candidate, each.note) for each in found.results if each.note]
    lines = [tag("li", tag("b", name), f": {note}") for name, note in notes]
    return tag("ul", *lines, class_="notes") if lines else Html("")


def _time_row(record: Record, result: Result, baselines: Sequence[str]) -> Sequence[str]:
    name = candidate_name(record, result.candidate)
    timing = result.timing
    if timing is None:
        return [name, badge(result), *(number(NONE) for _ in range(3 + len(baselines)))]
    ratios = {each.baseline: each for each in result.ratios}
    wide = "" if timing.converged else "warn"
    tip = f"95 % interval {time_text(timing.low_us)} to {time_text(timing.high_us)}"
    tip += "" if timing.converged else ", wider than requested: the time budget was spent"
    tip += f"\n{len(timing.samples_us)} samples, time counted on: {timing.counted}"
    half = (timing.high_us - timing.low_us) / 2 / timing.median_us if timing.median_us else 0.0
    cells = [
        number(_two(time_text(timing.median_us), f"±{half * 100:.1f} %"), class_=wide, tip=tip),
        number(time_text(timing.minimum_us)),
        number(share_text(result.floor_share)),
    ]
    for baseline in baselines:
        ratio = ratios.get(baseline)
        interval = f"{ratio.low:.2f} – {ratio.high:.2f}" if ratio else ""
        cells.append(number(_two(ratio_text(ratio.ratio), interval) if ratio else NONE))
    return [name, badge(result), *cells]


def _two(figure: str, interval: str) -> Html:
    """A figure with its interval below it."""
    return joined((figure, tag("br"), tag("small", interval)))


def kernels_table(record: Record) -> Html:
    """The steps of our plan, and the longest kernels of every candidate."""
    parts = [_steps_table(*each) for each in record.results if each[1].steps]
    others = [_launched_table(*each) for each in record.results if each[1].kernels]
    if others:
        words = tag("summary", "Device kernels of every candidate, longest first")
        parts.append(tag("details", words, *others))
    return joined(parts)


def _steps_table(found: Pass, result: Result) -> Html:
    heads = "step, graph, time, launches, bytes, operations, bytes/s, op/s, share of roof"
    rows = [_step_row(each) for each in result.steps]
    caption = f"{result.candidate}, {in_words(found.name)}: the steps of the plan in launch order"
    return table(heads.split(", "), rows, caption=caption, words=2)


def _step_row(step: StepTime) -> Sequence[str]:
    named, kind = "\n".join(step.kernels), step.kind if step.kind == "call" else "fused"
    name = tag("span", step.step, class_=f"step-name {kind}", title=named or None)
    share = step.roof_share
    return [
        name,
        step.graph,
        number(time_text(step.time_us)),
        number(f"{step.launches:g}"),
        number(bytes_text(step.bytes)),
        number(count_text(step.operations)),
        number(rate_text(step.bytes_per_s, "B")),
        number(rate_text(step.operations_per_s, "op")),
        tag("td", _meter(share), share_text(share), class_="n meter-cell"),
    ]


def _meter(share: float | None) -> Html:
    if share is None or not math.isfinite(share):
        return Html("")
    width = max(0.0, min(share, 1.0)) * 100
    return tag("span", tag("span", style=f"width:{width:.0f}%"), class_="meter", aria_hidden="true")


def _launched_table(found: Pass, result: Result) -> Html:
    rows: list[Sequence[str]] = [
        [
            tag("td", each.name, class_="code"),
            number(f"{each.launches:g}"),
            number(time_text(each.time_us)),
        ]
        for each in result.kernels[:_MOST_KERNELS]
    ]
    left = result.kernels[_MOST_KERNELS:]
    if left:
        total = time_text(sum(each.time_us for each in left))
        rows.append([f"and {len(left)} shorter ones", number(""), number(total)])
    caption = f"{result.candidate}, {in_words(found.name)}"
    return table(("kernel", "launches", "time"), rows, caption=caption)


def checks_table(found: Pass, most: int | None) -> Html:
    """One row per value, one column per candidate. At most `most` rows, wrong values first."""
    names = list(dict.fromkeys(check.name for each in found.results for check in each.checks))
    checked = [each for each in found.results if each.checks]
    if not names:
        return Html("")
    rows = [(name, [_worst(each, name) for each in checked]) for name in names]
    shown = rows
    if most is not None and len(rows) > most:
        # The sort is stable, so the values keep their order.
        shown = sorted(rows, key=lambda row: all(each is None or each.ok for each in row[1]))[:most]
    cells = [[tag("td", name, class_="code"), *map(_check_cell, row)] for name, row in shown]
    bad = sum(not check.ok for each in checked for check in each.checks)
    total = sum(len(each.checks) for each in checked)
    words = f"{title_of(found.name)}: {total} checks, " + (f"{bad} wrong" if bad else "all ok")
    words += f"; {len(rows) - len(shown)} more values not listed" if len(shown) < len(rows) else ""
    heads = ["value", *(each.candidate for each in checked)]
    return table(heads, cells, caption=words, class_="checks")


def _worst(result: Result, name: str) -> ValueCheck | None:
    """The worst of the checks before, during and after timing."""
    fitting = [each for each in result.checks if each.name == name]
    return max(fitting, key=lambda each: (not each.ok, _size(each.error)), default=None)


def _size(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def _check_cell(check: ValueCheck | None) -> Html:
    if check is None:
        return number(NONE)
    limits = (f"{precision_text(k)} {error_text(v)}" for k, v in check.limits.items())
    tip = (
        f"{check.name}, worst check: {check.when} timing",
        f"error {error_text(check.error)}, eager's {error_text(check.eager_error)}",
        f"largest single deviation {error_text(check.largest)}",
        f"accepted up to: {', '.join(limits)}",
        *([check.note] if check.note else []),
    )
    state = Html("")
    if not check.ok:
        state = tag("span", "wrong", class_="badge wrong")
    elif check.precision not in ("fp32", "fp64"):
        state = tag("span", precision_text(check.precision), class_="badge warn")
    words = joined((state, " ", error_text(check.error)))
    return tag("td", words, class_="n", data_tip="\n".join(tip))


def costs_table(record: Record) -> Html:
    """The costs besides the time of a call."""
    heads = (
        "candidate, optimize, cold build, warm build, overhead per call, peak memory, launches, "
        "emitted file"
    )
    rows = [_cost_row(record, each) for each in record.candidates]
    passes = " / ".join(in_words(each.name) for each in record.passes)
    methods = {each.costs.overhead_method for each in record.candidates} - {""}
    how = (
        f" Overhead: host time of a forward call, {', '.join(sorted(methods))}." if methods else ""
    )
    caption = f"Peak memory and launches: {passes}.{how}"
    return table(heads.split(", "), rows, caption=caption)


def _cost_row(record: Record, facts: CandidateFacts) -> Sequence[str]:
    results = [find(each.results, facts.name) for each in record.passes]
    peaks = [bytes_text(each.peak_bytes if each else None) for each in results]
    counts = [_launches(each) for each in results]
    costs = facts.costs
    return [
        candidate_name(record, facts.name),
        number(seconds_text(costs.optimize_seconds)),
        number(seconds_text(costs.cold_build_seconds)),
        number(seconds_text(costs.warm_build_seconds)),
        number(time_text(costs.overhead_us)),
        number(" / ".join(peaks) or NONE),
        number(" / ".join(counts) or NONE),
        number(bytes_text(costs.file_bytes)),
    ]


def _launches(result: Result | None) -> str:
    known = result is not None and result.kernel_launches is not None
    return f"{result.kernel_launches:g}" if known and result else NONE
