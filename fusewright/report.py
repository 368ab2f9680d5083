"""What the commands print and write: tables of plans, checks and timings, records, drafts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fusewright import __version__
from fusewright.emit.bundle import ProgramPlans, leading
from fusewright.errors import FusewrightError, OutputError
from fusewright.plan.show import human_bytes, human_count
from fusewright.plan.steps import Call, Plan, View
from fusewright.target.device import versions
from fusewright.tune.store import Tuned
from fusewright.verify.compare import Check


@dataclass(frozen=True)
class Outcome:
    """Everything that one `optimize` found out."""

    problem: str
    device: str
    mode: str
    plans: tuple[ProgramPlans, ...]
    build_seconds: float
    output: str
    checks: tuple[Check, ...] = ()
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    tuned: tuple[Tuned, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


GRAPH_TITLES = {
    "forward": "forward, when gradients are wanted",
    "inference": "forward, without gradients",
    "backward": "backward",
}


def named_plans(plans: ProgramPlans) -> list[tuple[str, Plan]]:
    """The plans that are run, under the names that are recorded."""
    named = [("forward", plans.forward), ("inference", plans.inference)]
    return [*named, ("backward", plans.backward)] if plans.backward else named


def print_plans(console: Console, plans: Sequence[ProgramPlans]) -> None:
    """One table per direction; modes that share a plan share its table."""
    tables: dict[tuple[tuple[str, str, str, str], ...], list[str]] = {}
    for each in leading(plans):
        for name, plan in named_plans(each):
            rows = tuple(_plan_rows(plan))
            title = f"{each.program.mode} mode: {GRAPH_TITLES[name]}"
            tables.setdefault(rows, []).append(title)
    for rows, titles in tables.items():
        table = Table(title="\n".join(titles), title_justify="left", title_style="bold")
        table.add_column("step", overflow="fold")
        table.add_column("what it does", overflow="fold")
        table.add_column("memory", justify="right")
        table.add_column("operations", justify="right")
        for row in rows:
            table.add_row(*row)
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


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    table = Table(title="Checks against float64", title_justify="left")
    table.add_column("value", overflow="fold")
    table.add_column("our error", justify="right")
    table.add_column("eager's error", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("")
    for check in checks:
        verdict = "[green]ok[/green]" if check.ok else "[red]WRONG[/red]"
        note = f" {check.note}" if check.note else ""
        table.add_row(
            check.name,
            f"{check.error:.2e}",
            f"{check.eager_error:.2e}",
            f"{check.allowed:.2e}",
            verdict + note,
        )
    console.print(table)


def print_timings(console: Console, timings: Mapping[str, float]) -> None:
    """Ours beside eager's, with the ratio."""
    table = Table(title="Median times of one interleaved run", title_justify="left")
    for column in ("", "eager", "ours", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("forward", "forward+backward"):
        eager, ours = timings.get(f"eager {name}"), timings.get(f"ours {name}")
        if eager is not None and ours is not None:
            table.add_row(name, f"{eager:.3f} ms", f"{ours:.3f} ms", f"{eager / ours:.2f}×")
    console.print(table)


def print_tuning(console: Console, tuned: Sequence[Tuned]) -> None:
    """The schedules that measuring changed, and how many it left as they were."""
    changed = [each for each in tuned if each.changed]
    if changed:
        table = Table(title="Schedules that tuning changed", title_justify="left")
        for column in ("kernel", "before", "after"):
            table.add_column(column, overflow="fold")
        for column in ("took", "takes", "measured"):
            table.add_column(column, justify="right")
        for each in changed:
            times = f"{each.heuristic_us:.1f} µs", f"{each.best_us:.1f} µs"
            table.add_row(each.kernel, *each.differences(), *times, each.date)
        console.print(table)
    rest = len(tuned) - len(changed)
    if rest:
        kernels = "1 tuned kernel keeps" if rest == 1 else f"{rest} tuned kernels keep"
        console.print(f"{kernels} the heuristic's schedule.")


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Plans, what tuning found, checks and, where all is right, times."""
    print_plans(console, outcome.plans)
    print_tuning(console, outcome.tuned)
    print_checks(console, outcome.checks)
    if outcome.timings_ms:
        print_timings(console, outcome.timings_ms)


def step_records(plans: Sequence[ProgramPlans]) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for each in leading(plans):
        for name, plan in named_plans(each):
            for step in plan.steps:
                if isinstance(step, View):
                    continue
                records.append(
                    {
                        "mode": each.program.mode,
                        "graph": name,
                        "kind": type(step).__name__.lower(),
                        "name": step.name,
                        "operators": list(step.operators),
                        "bytes": step.bytes_moved,
                        "operations": step.operations,
                        "reason": step.reason if isinstance(step, Call) else "",
                    }
                )
    return records


def check_records(checks: Sequence[Check]) -> list[dict[str, object]]:
    return [
        {
            "name": check.name,
            "error": _finite(check.error),
            "eager_error": _finite(check.eager_error),
            "allowed": _finite(check.allowed),
            "ok": check.ok,
            "note": check.note,
        }
        for check in checks
    ]


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


def _finite(value: float) -> float | str:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else repr(value)


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
        "timings_ms": dict(outcome.timings_ms),
        "build_seconds": outcome.build_seconds,
        "output": outcome.output,
    }
    write_record(path, record)


def write_record(path: Path, record: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def header(outcome: Outcome) -> str:
    """The opening words of an emitted file: where it was made, what was measured."""
    lines = [
        f"{outcome.problem}, with its operators fused by Fusewright {__version__}.",
        "",
        f"Made on {outcome.device}; " + ", ".join(f"{k} {v}" for k, v in versions().items()) + ".",
    ]
    for mode, reason in outcome.left_out:
        first = reason.split("\n")[0]
        lines += ["", f"In {mode} mode the original forward runs: {first}"]
    if outcome.timings_ms:
        lines += ["", "Median milliseconds of one interleaved run:"]
        lines += [f"  {name}: {value:.4g}" for name, value in outcome.timings_ms.items()]
    if outcome.checks:
        worst = sorted(outcome.checks, key=lambda check: -check.error)[:4]
        lines += ["", f"{len(outcome.checks)} checks against float64; largest relative errors:"]
        lines += [f"  {c.name}: {c.error:.2e} (eager {c.eager_error:.2e})" for c in worst]
    lines += ["", "Kernels (bytes moved and scalar operations at the example's sizes):"]
    seen: set[str] = set()
    for each in outcome.plans:
        for _, plan in named_plans(each):
            for step in plan.kernels:
                if step.name not in seen:
                    seen.add(step.name)
                    lines.append(
                        f"  {step.name}: {human_bytes(step.bytes_moved)}, "
                        f"{human_count(step.operations)} operations"
                    )
    changed = [each for each in outcome.tuned if each.changed]
    if changed:
        lines += ["", "Schedules that tuning changed (microseconds before and after):"]
        for found in changed:
            times = f"{found.heuristic_us:.1f}, {found.best_us:.1f}"
            lines.append(f"  {found.kernel}: {found.differences()[1]} ({times})")
    return "\n".join(lines)


def keep_apart(problem: Path, output: Path | None) -> None:
    """The problem is the user's own work, and nothing is written over it."""
    if output and output.exists() and problem.exists() and output.samefile(problem):
        raise OutputError(f"{output}: this is the problem itself; name another file to write to")


@contextmanager
def draft(output: Path, text: str) -> Iterator[Path]:
    """The emitted file beside its final place while it is checked; nothing half-made stays."""
    path = output.with_name(f".{output.stem}_draft.py")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        yield path
    except FusewrightError as error:
        # The draft is gone when the reader looks for it.
        raise type(error)(str(error).replace(path.name, output.name)) from error
    finally:
        path.unlink(missing_ok=True)
