"""The result of one `optimize`: its JSON record, and the emitted file with its header."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fusewright.emit.bundle import ModuleBundle, ProgramPlans, leading
from fusewright.emit.file import file_text, split_texts
from fusewright.emit.header import kernel_lines, opening_lines
from fusewright.errors import FusewrightError, OutputError
from fusewright.plan.steps import Call, View
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


def checks_words(checks: Sequence[Check]) -> str:
    """How many checks there are, and how many have eager for a truth."""
    beside = sum(not check.float64 for check in checks)
    words = f"{counted(len(checks) - beside, 'check')} against float64"
    return f"{words} and {beside} against eager PyTorch" if beside else words


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


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
        lines += ["", f"{checks_words(outcome.checks)}; largest relative errors:"]
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
