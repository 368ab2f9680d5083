"""The output of the commands: tables of plans, checks and times, records, drafts."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusewright.emit.bundle import ModuleBundle, ProgramPlans, leading
from fusewright.emit.file import file_text, split_texts
from fusewright.emit.header import kernel_lines, opening_lines
from fusewright.emit.steps import LITERAL
from fusewright.errors import FusewrightError, OutputError
from fusewright.plan.show import human_bytes, human_count
from fusewright.plan.steps import Call, Plan, View
from fusewright.target.device import versions
from fusewright.tune.store import Tuned
from fusewright.verify.compare import Check


@dataclass(frozen=True)
class Outcome:
    """The result of one `optimize`."""

    problem: str
    device: str
    mode: str
    plans: tuple[ProgramPlans, ...]
    output: str
    build_seconds: float = 0.0
    cached: bool = False  # no compiler ran
    checks: tuple[Check, ...] = ()
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    tuned: tuple[Tuned, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    # What was checked or timed in another way than usual, or not at all.
    notes: tuple[str, ...] = ()

    @property
    def how_written(self) -> str:
        how = "came from the cache" if self.cached else f"built in {self.build_seconds:.1f} s"
        return f"written; its kernels {how}"


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


def print_plans(console: Console, plans: Sequence[ProgramPlans]) -> None:
    """One table per graph; modes with the same plan share a table."""
    tables: dict[tuple[tuple[str, str, str, str], ...], list[str]] = {}
    for each in leading(plans):
        for name, plan in each.named:
            rows = tuple(_plan_rows(plan))
            title = f"{each.program.mode} mode: {GRAPH_TITLES[name]}"
            tables.setdefault(rows, []).append(title)
    for rows, titles in tables.items():
        title, figures = "\n".join(titles), ("memory", "operations")
        table = new_table(title, "step", "what it does", figures=figures, title_style="bold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for equation in dict.fromkeys(name for each in plans for name in each.program.algebra):
        console.print(f"algebra: {equation}", soft_wrap=True)


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


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    figures = ("our error", "eager's error", "allowed")
    table = new_table("Checks against float64", "value", figures=figures)
    table.add_column("")
    for check in checks:
        verdict = "[green]ok[/green]" if check.ok else "[red]WRONG[/red]"
        note = f" {check.note}" if check.note else ""
        errors = (f"{each:.2e}" for each in (check.error, check.eager_error, check.allowed))
        table.add_row(check.name, *errors, verdict + note)
    console.print(table)


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
        f"Right:  {_checks_words(outcome.checks)} passed; the largest error is "
        f"{worst.error:.1e}, eager PyTorch's is {worst.eager_error:.1e} there.",
        f"{label + ':':8}{', '.join(times)} as fast as eager PyTorch.",
    )


def _checks_words(checks: Sequence[Check]) -> str:
    """How many checks there are, and how many have eager for a truth."""
    beside = sum(not check.float64 for check in checks)
    words = f"{_counted(len(checks) - beside, 'check')} against float64"
    return f"{words} and {beside} against eager PyTorch" if beside else words


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
    return f"{_counted(operators, 'operator')} in {_counted(len(plan.kernels), 'kernel')}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


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


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Plans, tuned schedules, checks and, if all checks are right, times."""
    print_plans(console, outcome.plans)
    print_tuning(console, outcome.tuned)
    print_checks(console, outcome.checks)
    print_notes(console, outcome.notes)
    if outcome.timings_ms:
        print_timings(console, outcome.timings_ms)


def step_records(plans: Sequence[ProgramPlans]) -> list[dict[str, object]]:
    return [
        {
            "mode": each.program.mode,
            "graph": name,
            "kind": step.kind,
            "name": step.name,
            "operators": list(step.operators),
            "bytes": step.bytes_moved,
            "operations": step.operations,
            "reason": step.reason if isinstance(step, Call) else "",
        }
        for each in leading(plans)
        for name, plan in each.named
        for step in plan.steps
        if not isinstance(step, View)
    ]


def check_records(checks: Sequence[Check]) -> list[dict[str, object]]:
    names = ("name", "error", "eager_error", "allowed", "ok", "note", "float64")
    return [{name: _in_json(getattr(check, name)) for name in names} for check in checks]


def tuning_records(tuned: Sequence[Tuned]) -> list[dict[str, object]]:
    return [
        {
            "name": each.kernel,
            "changed": each.changed,
            "before": asdict(each.heuristic),
            "after": asdict(each.schedule),
            "before_us": each.heuristic_us,
            "after_us": each.best_us,
            "date": each.date,
        }
        for each in tuned
    ]


def _in_json(value: object) -> object:
    """JSON has no infinity and no NaN."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, outcome: Outcome) -> None:
    record = {
        "problem": outcome.problem,
        "device": outcome.device,
        "versions": versions(),
        "mode": outcome.mode,
        "left_out": dict(outcome.left_out),
        "steps": step_records(outcome.plans),
        "tuning": tuning_records(outcome.tuned),
        "checks": check_records(outcome.checks),
        "notes": list(outcome.notes),
        "timings_ms": dict(outcome.timings_ms),
        "build_seconds": outcome.build_seconds,
        "output": outcome.output,
    }
    write_record(path, record)


def write_record(path: Path, record: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def header(outcome: Outcome) -> str:
    """The docstring of an emitted file: where it was made, and what was measured."""
    made = (outcome.problem, outcome.device, versions())
    lines = opening_lines(*made, outcome.left_out, outcome.plans)
    if outcome.timings_ms:
        lines += ["", "Median milliseconds of one interleaved run:"]
        lines += [f"  {name}: {value:.4g}" for name, value in outcome.timings_ms.items()]
    if outcome.checks:
        worst = sorted(outcome.checks, key=lambda check: -check.error)[:4]
        lines += ["", f"{_checks_words(outcome.checks)}; largest relative errors:"]
        lines += [f"  {c.name}: {c.error:.2e} (eager {c.eager_error:.2e})" for c in worst]
    for note in outcome.notes:
        lines += textwrap.wrap(note, 96, initial_indent="- ", subsequent_indent="  ")
    lines += kernel_lines(outcome.plans)
    changed = [each for each in outcome.tuned if each.changed]
    if changed:
        lines += ["", "Schedules that tuning changed (microseconds before and after):"]
        for found in changed:
            times = f"{found.heuristic_us:.1f}, {found.best_us:.1f}"
            lines.append(f"  {found.kernel}: {found.differences()[1]} ({times})")
    return "\n".join(lines)


def write_files(
    output: Path,
    beside: Path | None,
    bundle: ModuleBundle,
    source: str,
    outcome: Outcome,
    *,
    keep_words: bool,
) -> None:
    """Write the emitted file; its support code goes to `beside`, if that is given."""
    parts = (bundle, source, header(outcome))
    if beside is None:
        text = file_text(*parts, keep_words=keep_words)
    else:
        text, support = split_texts(*parts, beside.name, keep_words=keep_words)
        beside.write_text(support, encoding="utf-8")
    output.write_text(text, encoding="utf-8")


def keep_apart(problem: Path, output: Path | None) -> None:
    """Never overwrite the user's problem file."""
    if output and output.exists() and problem.exists() and output.samefile(problem):
        raise OutputError(f"{output}: this is the problem itself; name another file to write to")


@contextmanager
def draft(output: Path, text: str) -> Iterator[Path]:
    """The emitted file in its final folder while it is checked; it is removed afterwards."""
    path = output.with_name(f".{output.stem}_draft.py")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        yield path
    except FusewrightError as error:
        # The draft is removed, so the message names the final file.
        raise type(error)(str(error).replace(path.name, output.name)) from error
    finally:
        path.unlink(missing_ok=True)
