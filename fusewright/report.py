"""What the commands print: tables of plans, checks and times, and the last lines of `optimize`.

A network has hundreds of steps and checks. Unless all are asked for, a long plan is one row for
each pass, and of many right checks those nearest to their bounds are shown.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusewright.emit.bundle import ProgramPlans, leading
from fusewright.emit.steps import LITERAL
from fusewright.outcome import Outcome, checks_words, counted
from fusewright.plan.show import human_bytes, human_count
from fusewright.plan.steps import Call, Plan, View
from fusewright.tune.store import Tuned
from fusewright.verify.compare import Check

MOST_STEPS, MOST_CHECKS = 24, 12  # that are shown one by one
GRAPH_TITLES = {
    "forward": "forward, when gradients are wanted",
    "inference": "forward, without gradients",
    "backward": "backward",
}


def new_table(title: str, *words: str, figures: Sequence[str] = (), **style: Any) -> Table:
    """An empty table. Columns of words are aligned left, columns of figures right."""
    table = Table(title=title, title_justify="left", **style)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    return table


def print_plans(console: Console, plans: Sequence[ProgramPlans], *, details: bool = True) -> None:
    """One table per graph; modes with the same plan share a table. A long plan is summed up,
    unless `details` are wanted."""
    tables: dict[tuple[tuple[str, str, str, str], ...], list[str]] = {}
    summed: dict[tuple[str, ...], list[str]] = {}
    for each in leading(plans):
        for name, plan in each.named:
            mode, title = each.program.mode, GRAPH_TITLES[name]
            tables.setdefault(tuple(_plan_rows(plan)), []).append(f"{mode} mode: {title}")
            summed.setdefault(_sum_row(plan), []).append(f"{mode}: {title}")
    if details or sum(map(len, tables)) <= MOST_STEPS:
        _print_steps(console, tables)
    else:
        _print_sums(console, summed)
        _print_reasons(console, plans)
    for equation in dict.fromkeys(name for each in plans for name in each.program.algebra):
        console.print(f"algebra: {equation}", soft_wrap=True)


def _print_steps(
    console: Console, tables: Mapping[tuple[tuple[str, str, str, str], ...], Sequence[str]]
) -> None:
    for rows, titles in tables.items():
        title, figures = "\n".join(titles), ("memory", "operations")
        table = new_table(title, "step", "what it does", figures=figures, title_style="bold")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _print_sums(console: Console, summed: Mapping[tuple[str, ...], Sequence[str]]) -> None:
    """A row for each pass."""
    figures = ("fused operators", "kernels", "PyTorch calls", "memory", "operations")
    table = new_table("What runs", "pass", figures=figures, title_style="bold")
    table.columns[0].no_wrap = True
    for row, titles in summed.items():
        table.add_row("\n".join(titles), *row)
    console.print(table)


def _sum_row(plan: Plan) -> tuple[str, ...]:
    """Kernels, PyTorch calls, memory and operations of a whole plan."""
    steps = [step for step in plan.steps if not isinstance(step, View)]
    memory = human_bytes(sum(step.bytes_moved for step in steps))
    operations = human_count(sum(step.operations for step in steps))
    kernels, operators = len(plan.kernels), sum(len(step.operators) for step in plan.kernels)
    return str(operators), str(kernels), str(len(steps) - kernels), memory, operations


def _print_reasons(console: Console, plans: Sequence[ProgramPlans]) -> None:
    """Why operators stay PyTorch calls: each reason once."""
    graphs = [plan for each in leading(plans) for _, plan in each.named]
    calls = [step for plan in graphs for step in plan.steps if isinstance(step, Call)]
    counts = Counter((step.node.op, step.reason) for step in calls if step.node.op != LITERAL)
    if not counts:
        return
    table = new_table("What PyTorch runs, in all passes", "operator", "why", figures=("calls",))
    for (operator, reason), count in counts.most_common():
        table.add_row(f"[yellow]{operator}[/yellow]", reason, str(count))
    console.print(table)


def _plan_rows(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    for step in plan.steps:
        match step:
            case View():
                continue
            case Call():
                name, what = f"[yellow]{step.node.op}[/yellow]", f"PyTorch call: {step.reason}"
            case _:
                name, what = f"[green]{step.name}[/green]", f"fused: {step.kernel.summary}"
        yield name, what, human_bytes(step.bytes_moved), human_count(step.operations)


def print_checks(console: Console, checks: Sequence[Check], *, details: bool = True) -> None:
    """All checks, or the wrong ones and those that are nearest to their bounds."""
    figures = ("our error", "eager's error", "allowed")
    table = new_table("Checks against float64", "value", figures=figures)
    table.add_column("")
    shown = checks if details else _worst(checks)
    for check in shown:
        verdict = "[green]ok[/green]" if check.ok else "[red]WRONG[/red]"
        note = f" {check.note}" if check.note else ""
        errors = (f"{each:.2e}" for each in (check.error, check.eager_error, check.allowed))
        table.add_row(check.name, *errors, verdict + note)
    console.print(table)
    if len(shown) < len(checks):
        words = (
            f"{counted(len(checks) - len(shown), 'more check')}, all ok, further from their bounds"
        )
        console.print(f"{words}; --details shows them, and every step of the plan.")


def _worst(checks: Sequence[Check]) -> Sequence[Check]:
    if len(checks) <= MOST_CHECKS:
        return checks
    wrong = [check for check in checks if not check.ok]
    right = (check for check in checks if check.ok)
    near = sorted(right, key=lambda check: -check.error / max(check.allowed, 1e-300))
    return [*wrong, *near[: MOST_CHECKS // 2]]


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """What was checked in another way than usual, or not at all."""
    for note in notes:
        console.print(f"• {note}", soft_wrap=True, highlight=False, markup=False)


def print_timings(console: Console, timings: Mapping[str, float]) -> None:
    """Eager's times and ours, with the ratio."""
    figures = ("eager", "ours", "ratio")
    table = new_table("Median times of one interleaved run", "", figures=figures)
    for name, eager, ours in _timed_passes(timings):
        table.add_row(name, f"{eager:.3f} ms", f"{ours:.3f} ms", f"{eager / ours:.2f}×")
    console.print(table)


def _timed_passes(timings: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Each pass that has both times, with eager's and ours in milliseconds."""
    for name in ("forward", "forward+backward"):
        if f"eager {name}" in timings and f"ours {name}" in timings:
            yield name, timings[f"eager {name}"], timings[f"ours {name}"]


def print_summary(console: Console, outcome: Outcome, problem: Path) -> None:
    """The last lines: the result in words, and what to type next."""
    python, here = Path(sys.executable), Path.cwd()
    shown = str(python.relative_to(here)) if python.is_relative_to(here) else python.name
    if "PYTHONPATH" in os.environ:
        shown = f"PYTHONPATH={os.environ['PYTHONPATH']} {shown}"
    for line in (*summary(outcome), f"Next:   {shown} -m fusewright bench {problem}"):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def summary(outcome: Outcome) -> tuple[str, ...]:
    """What was fused, how exact it is, how fast it is; empty if nothing was timed."""
    if not outcome.timings_ms:
        return ()
    true = [check for check in outcome.checks if check.float64] or outcome.checks
    worst = max(true, key=lambda check: check.error)
    passes = tuple(_timed_passes(outcome.timings_ms))
    label = "Faster" if all(ours < eager for _, eager, ours in passes) else "Speed"
    times = (f"{name} {eager / ours:.2f}×" for name, eager, ours in passes)
    return (
        f"Fused:  {_fused_words(next(iter(leading(outcome.plans))))}.",
        f"Right:  {checks_words(outcome.checks)} passed; the largest error is "
        f"{worst.error:.1e}, eager PyTorch's is {worst.eager_error:.1e} there.",
        f"{label + ':':8}{', '.join(times)} as fast as eager PyTorch.",
    )


def _fused_words(plans: ProgramPlans) -> str:
    """Operators and kernels of forward and backward, and the operators left to PyTorch."""
    unused = "inference" if plans.backward else "forward"
    named = [each for each in plans.named if each[0] != unused]
    words = [f"{name} {_kernel_words(plan)}" for name, plan in named]
    nodes = [step.node for _, plan in named for step in plan.steps if isinstance(step, Call)]
    calls = [node.op for node in nodes if node.op != LITERAL]
    short = dict.fromkeys(op.split(".")[1] if "." in op else op for op in calls)
    rest = f"PyTorch runs {', '.join(short)}" if calls else "nothing is left to PyTorch"
    return f"{'; '.join(words)}; {rest}"


def _kernel_words(plan: Plan) -> str:
    operators = sum(len(step.operators) for step in plan.kernels)
    return f"{counted(operators, 'operator')} in {counted(len(plan.kernels), 'kernel')}"


def print_tuning(console: Console, tuned: Sequence[Tuned]) -> None:
    """The schedules that tuning changed, and how many it kept."""
    changed = [each for each in tuned if each.changed]
    if changed:
        title, figures = "Schedules that tuning changed", ("took", "takes", "measured")
        table = new_table(title, "kernel", "before", "after", figures=figures)
        for each in changed:
            times = f"{each.heuristic_us:.1f} µs", f"{each.best_us:.1f} µs"
            table.add_row(each.kernel, *each.differences(), *times, each.date)
        console.print(table)
    rest = len(tuned) - len(changed)
    if rest:
        kernels = "1 tuned kernel keeps" if rest == 1 else f"{rest} tuned kernels keep"
        console.print(f"{kernels} the heuristic's schedule.")


def print_outcome(console: Console, outcome: Outcome, *, details: bool = True) -> None:
    """Plans, tuned schedules, checks and, if all checks are right, times."""
    print_plans(console, outcome.plans, details=details)
    print_tuning(console, outcome.tuned)
    print_checks(console, outcome.checks, details=details)
    print_notes(console, outcome.notes)
    if outcome.timings_ms:
        print_timings(console, outcome.timings_ms)
