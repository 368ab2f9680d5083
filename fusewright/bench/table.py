"""Records and comparisons as tables on the terminal."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusewright.bench.record import BASELINES, CandidateFacts, Collection, Pass, Record, Result
from fusewright.bench.regressions import Change
from fusewright.bench.summary import THRESHOLDS, is_good, wrong_results
from fusewright.plan.show import human_bytes, human_count
from fusewright.report import new_table

_table = functools.partial(new_table, title_style="bold", box=box.SIMPLE_HEAD)
_STATUS = {
    "wrong": "[red]WRONG[/red]",
    "failed": "[red]failed[/red]",
    "skipped": "[dim]skipped[/dim]",
}
_VERDICT = {
    "slower": "[red]slower[/red]",
    "lost": "[red]lost its time[/red]",
    "coarser": "[red]coarser[/red]",
    "faster": "[green]faster[/green]",
    "same": "[dim]same[/dim]",
    "new": "new",
}


def print_record(console: Console, record: Record) -> None:
    """Times, kernels and costs of one problem."""
    for each in record.passes:
        console.print(_pass_table(each))
        for result in each.results:
            if result.note:
                console.print(escape(f"  {result.candidate}: {result.note}"), soft_wrap=True)
        for result in each.results:
            if result.steps:
                console.print(_steps_table(result))
    console.print(_costs_table(record))
    if record.rates:
        rates = [f"copy {human_bytes(int(record.rates.copy_bytes_per_s))}/s"]
        rates += [f"{k} {human_count(int(v))}FLOP/s" for k, v in record.rates.products.items()]
        console.print(f"Measured in this run: {', '.join(rates)}.", soft_wrap=True)
    if record.environment and record.environment.busy:
        console.print(f"Warning: {record.environment.busy}.", soft_wrap=True)


def human_us(value: float | None) -> str:
    """1234.5 → 1.23 ms."""
    if value is None:
        return ""
    if value < 1000:
        return f"{value:.3g} µs"
    return f"{value / 1000:.3g} ms" if value < 1e6 else f"{value / 1e6:.3g} s"


def _pass_table(each: Pass) -> Table:
    title = f"{each.name} ({each.mode} mode), {each.rounds} rounds; {_floor_words(each)}"
    held = {ratio.baseline for result in each.results for ratio in result.ratios}
    baselines = [name for name in BASELINES if name in held]
    figures = ["precision\nerror", "median\n95 %", "least", "of\nfloor"]
    figures += [f"against\n{baseline}" for baseline in baselines]
    table = _table(title, "candidate", figures=figures)
    for result in each.results:
        table.add_row(*_cells(result, baselines))
    return table


def _cells(result: Result, baselines: Sequence[str]) -> list[str]:
    timing = result.timing
    error = f"{max(c.error for c in result.checks):.1e}" if result.checks else ""
    if timing is None:
        return [escape(result.candidate), _STATUS.get(result.status, result.status) + f"\n{error}"]
    spread = f"±{(timing.high_us - timing.low_us) / timing.median_us / 2:.1%}"
    if not timing.converged:  # wider than requested: the budget was too small
        spread = f"[yellow]{spread}[/yellow]"
    ratios = {each.baseline: each for each in result.ratios}
    shown = [
        f"{ratios[b].ratio:.2f}×\n{ratios[b].low:.2f}–{ratios[b].high:.2f}" if b in ratios else ""
        for b in baselines
    ]
    return [
        escape(result.candidate),
        f"{_marked(result.precision)}\n{error}",
        f"{human_us(timing.median_us)}\n{spread}",
        human_us(timing.minimum_us),
        f"{result.floor_share:.0%}" if result.floor_share is not None else "",
        *map(escape, shown),
    ]


def _marked(precision: str) -> str:
    """Every class except fp32 has a colour."""
    return precision if precision == "fp32" else f"[yellow]{precision}[/yellow]"


def _floor_words(each: Pass) -> str:
    floor = each.floor
    if floor is None or not floor.floor_us:
        return "floor unknown"
    work = f"{human_bytes(floor.bytes)}, {human_count(floor.operations)} matmul operations"
    times = ", ".join(f"{name} {human_us(value)}" for name, value in floor.floor_us.items())
    return f"least {work}; floor: {times}"


def _steps_table(result: Result) -> Table:
    figures = ("time", "memory", "rate", "opera-\ntions", "of its\nroof")
    table = _table(f"{result.candidate}, step by step", "graph", "step", figures=figures)
    for each in result.steps:
        rate = f"{human_bytes(int(each.bytes_per_s))}/s" if each.bytes_per_s else ""
        share = f"{each.roof_share:.0%}" if each.roof_share else ""
        cells = [human_us(each.time_us), human_bytes(each.bytes), rate]
        table.add_row(each.graph, each.step, *cells, human_count(each.operations), share)
    return table


def _costs_table(record: Record) -> Table:
    figures = ("cold\nbuild", "warm\nbuild", "call\noverhead", "file", "launches", "peak\nmemory")
    table = _table("Other costs", "candidate", figures=figures)
    for each in record.candidates:
        table.add_row(*_cost_cells(each, record))
    return table


def _cost_cells(facts: CandidateFacts, record: Record) -> list[str]:
    costs = facts.costs
    results = [result for _, result in record.results if result.candidate == facts.name]
    counts = [f"{r.kernel_launches:g}" for r in results if r.kernel_launches is not None]
    peaks = [r.peak_bytes for r in results if r.peak_bytes is not None]
    return [
        escape(facts.name),
        _seconds(costs.cold_build_seconds),
        _seconds(costs.warm_build_seconds),
        human_us(costs.overhead_us),
        human_bytes(costs.file_bytes) if costs.file_bytes else "",
        " / ".join(counts),
        human_bytes(max(peaks)) if peaks else "",
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2g} s"


def print_collection(console: Console, collection: Collection) -> None:
    """Many problems: one row each, then the spread of their speedups."""
    table = _table("Problems, the worst first", "problem", "result")
    for record in collection.records:
        table.add_row(escape(record.problem.name), _verdict(record))
    console.print(table)
    if not collection.spreads:
        return
    figures = ["timed\nof all", "geom.\nmean", "median", *(f"> {t:g}×" for t in THRESHOLDS)]
    table = _table("Speedups over all problems", "pass, candidate\nagainst", figures=figures)
    for each in collection.spreads:
        shares = [f"{each.shares[f'{t:g}']:.0%}" for t in THRESHOLDS]
        count = f"{each.count} of {each.problems or each.count}"
        names = f"{each.pass_name}, {escape(each.candidate)}\n{each.baseline}"
        means = (f"{each.geometric_mean:.2f}×", f"{each.median:.2f}×")
        table.add_row(names, count, *means, *shares)
    console.print(table)


def _verdict(record: Record) -> str:
    if record.status != "ok":
        return f"[red]{record.status}[/red]: {escape(record.error)}"
    if not is_good(record):
        words = [f"{name}: {r.candidate} {r.status}, {r.note}" for name, r in wrong_results(record)]
        return f"[red]wrong[/red]: {escape('; '.join(words))}"
    parts = (_speeds(each, result) for each, result in record.judged if result.ratios)
    return "\n".join(parts) or "timed"


def _speeds(each: Pass, result: Result) -> str:
    """forward, ours, tf32: 1.82× compile, 4.46× eager (fp32); our own fp32 is not mentioned."""
    classes = {other.candidate: other.precision for other in each.results}
    marked = {
        name: "" if kind == result.precision else f" ({_marked(kind)})"
        for name, kind in classes.items()
    }
    own = "" if result.precision == "fp32" else f", {_marked(result.precision)}"
    ratios = (f"{r.ratio:.2f}× {r.baseline}{marked.get(r.baseline, '')}" for r in result.ratios)
    return f"{each.name}, {escape(result.candidate)}{own}: {', '.join(ratios)}"


def print_changes(console: Console, found: Sequence[Change], differ: Sequence[str]) -> None:
    """Old and new side by side, regressions first."""
    for line in differ:
        console.print(f"[yellow]the runs differ in[/yellow] {escape(line)}", soft_wrap=True)
    figures = ("old", "new", "ratio", "verdict")
    table = _table("New time over old", "problem", "pass", "candidate", figures=figures)
    for each in found:
        ratio = each.ratio
        words = f"{ratio.value:.3f}\n{ratio.low:.3f}–{ratio.high:.3f}" if ratio else ""
        verdict = _VERDICT[each.verdict] + (f": {escape(each.note)}" if each.note else "")
        verdict += "" if each.counts else " [dim](baseline)[/dim]"
        times = (human_us(each.old_us), human_us(each.new_us))
        name = (escape(each.problem), each.pass_name, escape(each.candidate))
        table.add_row(*name, *times, escape(words), verdict)
    console.print(table)
