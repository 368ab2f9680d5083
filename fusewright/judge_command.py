"""The command `judge`: arguments, and the verdicts as text, JSON and a page."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusewright.errors import ProblemError
from fusewright.options import seconds_option, unconfined_option

if TYPE_CHECKING:
    from fusewright.judge.timekeeper import Timing
    from fusewright.judge.verdict import Verdict

_PATH = click.Path(path_type=Path)
_GIB = 1 << 30


@click.command()
@click.argument("problem", type=_PATH)
@click.argument("models_new", metavar="MODEL_NEW...", type=_PATH, nargs=-1, required=True)
@click.option("--json", "json_file", type=_PATH, help="Also write a JSON record.")
@click.option("--html", type=_PATH, help="Also write a page.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to run; the CPU."
)
@seconds_option
@click.option("--memory", type=click.FloatRange(min=1.0), help="GiB that a candidate may address.")
@click.option("--time/--no-time", "timed", default=True, help="Time what is right. [default: on]")
@click.option(
    "--baselines",
    default="eager,compile",
    show_default=True,
    help="What to time it beside.",
)
@click.option(
    "--time-seconds",
    "budget_s",
    type=click.FloatRange(min=0.1),
    default=4.0,
    show_default=True,
    help="Seconds of timing for each pass.",
)
@click.option("--strict", is_flag=True, help="A flag counts as a failure.")
@unconfined_option
def judge(
    problem: Path,
    models_new: tuple[Path, ...],
    json_file: Path | None,
    html: Path | None,
    device: str,
    seconds: float,
    memory: float | None,
    timed: bool,
    baselines: str,
    budget_s: float,
    strict: bool,
    unconfined: bool,
) -> None:
    """Judge anyone's ModelNew in a process of its own: right, honest and faster, or why not.

    MODEL_NEW is a file, or a folder of files. The exit code tells the verdict on a single file.
    """
    from fusewright.judge.judge import judge as run
    from fusewright.judge.process import Limits

    timing = _timing(baselines, budget_s) if timed else None
    limits = Limits(seconds, int((memory or 0) * _GIB))
    verdicts: dict[Path, Verdict] = {}
    for path in _files(models_new):
        how: dict[str, Any] = {
            "confined": not unconfined,
            "strict": strict,
            "timing": timing,
            "device": device,
        }
        verdict = run(problem, path, limits=limits, **how)
        verdicts[path] = verdict
        first, *rest = verdict.lines()
        click.echo("\n".join((f"{path}: {first}", *rest)))
    if json_file:
        records = [_record(problem, path, each) for path, each in verdicts.items()]
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n")
    if html:
        from fusewright.page.judgement import render_verdicts

        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(render_verdicts(problem, verdicts))
    codes = [each.exit_code for each in verdicts.values()]
    sys.exit(codes[0] if len(codes) == 1 else int(any(codes)))


def _timing(baselines: str, budget_s: float) -> Timing:
    from fusewright.judge.baselines import BASELINES
    from fusewright.judge.timekeeper import Timing

    names = tuple(filter(None, map(str.strip, baselines.split(","))))
    for name in names:
        if name not in BASELINES:
            known = ", ".join(BASELINES)
            raise ProblemError(f"there is no baseline {name!r}: choose from {known}")
    return Timing(names, budget_s=budget_s)


def _files(given: Sequence[Path]) -> list[Path]:
    """The files, and those in folders."""
    found = [
        file for each in given for file in (sorted(each.glob("*.py")) if each.is_dir() else [each])
    ]
    if not found:
        raise ProblemError(f"{given[0]}: there is no Python file in this folder")
    return found


def _record(problem: Path, path: Path, verdict: Verdict) -> dict[str, object]:
    from fusewright.target.device import versions

    return {
        "problem": str(problem),
        "candidate": str(path),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "verdict": verdict.word,
        "exit_code": verdict.exit_code,
        "versions": versions(),
        **{name: value for name, value in asdict(verdict).items() if name != "word"},
    }
