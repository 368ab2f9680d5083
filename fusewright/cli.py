"""The command line: arguments and progress."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console

from fusewright import __version__
from fusewright.errors import FusewrightError
from fusewright.judge_command import judge
from fusewright.options import (
    MODE_NAMES,
    PATH,
    algebra_option,
    check_option,
    device_option,
    json_option,
    mode_option,
    problem_argument,
    seconds_option,
    unconfined_option,
)
from fusewright.progress import Steps

if TYPE_CHECKING:
    import torch

    from fusewright.compile.solution import Solution
    from fusewright.outcome import Outcome
    from fusewright.problem.load import Problem
    from fusewright.tune.search import OnProgress
    from fusewright.verify.budget import Budget

TIMING_BUDGET_S = 6.0
CHECK_BUDGET_S = 45.0
TUNE_STEP = "tune"
STEP_NAMES = ("load the problem", "capture and compile", "check against float64", "time")

BENCH_PASSES = {"forward": ("forward",), "train": ("train",), "both": ("forward", "train")}
BENCH_JSON_HELP = "Write the record here; for a folder, a file of all records or a folder of them."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fusewright")
def cli() -> None:
    """Turn PyTorch models into fused CUDA C++ or host C++ kernels, checked against float64."""


@cli.command()
@problem_argument
@click.option(
    "-o", "--output", type=PATH, help="Where to write ModelNew (default: PROBLEM_new.py)."
)
@json_option
@device_option
@mode_option
@check_option
@click.option(
    "--tune", is_flag=True, help="Measure schedules of each kernel; use the fastest, now and later."
)
@click.option(
    "--split", is_flag=True, help="Write the support code beside it, to OUTPUT_support.py."
)
@click.option(
    "--keep-words",
    is_flag=True,
    help="Keep the words pass, try and except, which strict checkers of kernels refuse.",
)
@click.option("--details", is_flag=True, help="Print every step of the plan and every check.")
@algebra_option
def optimize(problem: Path, output: Path | None, device: str | None, **options: Any) -> None:
    """Write a standalone ModelNew for PROBLEM, check it and time it."""
    from fusewright import report
    from fusewright.outcome import keep_apart, write_files, write_json
    from fusewright.problem.load import load_problem

    output = output or problem.with_name(f"{problem.stem}_new.py")
    request = Request(problem, output, device or default_device(), **options)
    console = Console()
    for path in (output, request.json_file, request.beside):
        keep_apart(problem, path)
    names = (*STEP_NAMES[:2], TUNE_STEP, *STEP_NAMES[2:]) if request.tune else STEP_NAMES
    # A drawing thread would disturb the measurement of schedules.
    steps = Steps(console, names, animated=not request.tune)
    with steps.running():
        steps.next(STEP_NAMES[0])
        loaded = load_problem(problem)
        solution, outcome = optimized(request, loaded, steps)
    report.print_outcome(console, outcome, details=request.details)
    if request.json_file:
        write_json(request.json_file, outcome)
    if not outcome.checks:
        fail(f"{loaded.name}: the model gives nothing to check, so no file was written", 1)
    if not all(check.ok for check in outcome.checks):
        fail(f"{loaded.name}: a check failed, so no file was written", 1)
    written, words = (solution.bundle, loaded.source, outcome), request.keep_words
    write_files(output, request.beside, *written, keep_words=words)
    console.print(f"[bold]{output}[/bold] {outcome.how_written}.", soft_wrap=True)
    report.print_summary(console, outcome, problem)


@dataclass(frozen=True)
class Request:
    """What `optimize` was asked for."""

    problem: Path
    output: Path
    device: str
    json_file: Path | None
    mode: str
    check_s: float | None
    tune: bool
    split: bool
    keep_words: bool
    details: bool

    @property
    def beside(self) -> Path | None:
        """The file of the support code, if it is wanted."""
        return self.output.with_name(f"{self.output.stem}_support.py") if self.split else None


def optimized(request: Request, loaded: Problem, steps: Steps) -> tuple[Solution, Outcome]:
    """Compile a problem, then check and time the result."""
    from fusewright.compile.solution import told_once
    from fusewright.problem.inputs import resolve_device
    from fusewright.verify.budget import budget_of, free_memory
    from fusewright.verify.reuse import reusing

    where = resolve_device(request.device)
    loaded = replace(loaded, make_model=reusing(loaded.make_model, where))
    steps.next(STEP_NAMES[1])
    tuning = functools.partial(steps.line, TUNE_STEP) if request.tune else None
    words = request.keep_words
    solution = solved(loaded, where, request.mode, tuning, steps.stage, keep_words=words)
    free_memory(where)
    budget = budget_of(where, CHECK_BUDGET_S if request.check_s is None else request.check_s)
    with told_once(solution):
        return solution, checked(request, loaded, solution, where, steps, budget)


def checked(
    request: Request,
    loaded: Problem,
    solution: Solution,
    where: torch.device,
    steps: Steps,
    budget: Budget,
) -> Outcome:
    """Check and time the emitted text itself, from a draft of its file."""
    from fusewright.bench.side_by_side import time_models
    from fusewright.compile.file_build import build_kernels
    from fusewright.emit.file import file_text
    from fusewright.outcome import Outcome, draft, header
    from fusewright.problem.load import load_candidate
    from fusewright.target.device import device_name
    from fusewright.verify.reuse import reusing
    from fusewright.verify.verify import verify

    outcome = Outcome(
        problem=loaded.name,
        device=device_name(where),
        mode=request.mode,
        plans=solution.prepared.modes,
        output=str(request.output),
        tuned=solution.prepared.tuned,
        left_out=solution.prepared.left_out,
        build_seconds=solution.seconds,
        cached=solution.cached,
    )
    words = header(outcome)
    text = file_text(solution.bundle, loaded.source, words, keep_words=request.keep_words)
    with draft(request.output, text) as path:
        candidate = load_candidate(path, loaded)
        make = reusing(candidate.make, where)
        modes, progress = MODE_NAMES[request.mode], steps.stage
        build_kernels(candidate.names, solution.bundle.language, progress)
        steps.next(STEP_NAMES[2])
        report = verify(loaded, make, device=where, modes=modes, budget=budget, progress=progress)
        outcome = replace(outcome, checks=report.checks, notes=report.notes)
        if not report.ok:
            return outcome
        steps.next(STEP_NAMES[3])
        training = request.mode != "eval"
        times = time_models(loaded, make, device=where, budget_s=TIMING_BUDGET_S, training=training)
    return replace(outcome, timings_ms=times.ms, notes=(*report.notes, *times.notes))


@cli.command()
@problem_argument
@device_option
@mode_option
@algebra_option
def explain(problem: Path, device: str | None, mode: str) -> None:
    """Show what would be fused in PROBLEM, what stays a PyTorch call, and why."""
    from fusewright.compile.pipeline import prepare
    from fusewright.problem.inputs import resolve_device
    from fusewright.problem.load import load_problem
    from fusewright.report import print_plans
    from fusewright.verify.feeds import make_inputs

    where = resolve_device(device or default_device())
    loaded = load_problem(problem)
    model, args = loaded.make_model().to(where), make_inputs(loaded, where)
    steps = Steps(Console(stderr=True), (STEP_NAMES[1],))
    with steps.running():
        modes, progress = MODE_NAMES[mode], steps.stage
        prepared = prepare(model, args, modes=modes, device=where, progress=progress)
    print_plans(Console(), prepared.modes)


@cli.command()
@problem_argument
@click.argument("model_new", type=PATH)
@json_option
@device_option
@mode_option
@check_option
@seconds_option
@unconfined_option
def verify(
    problem: Path,
    model_new: Path,
    json_file: Path | None,
    device: str | None,
    mode: str,
    check_s: float | None,
    seconds: float,
    unconfined: bool,
) -> None:
    """Check the ModelNew in MODEL_NEW against the Model in PROBLEM, in a process of its own."""
    from fusewright.judge.boxed import Boxed
    from fusewright.judge.process import Limits
    from fusewright.outcome import check_records, write_record
    from fusewright.problem.inputs import resolve_device
    from fusewright.problem.load import load_problem
    from fusewright.report import print_checks, print_notes
    from fusewright.target.device import device_name, versions
    from fusewright.verify.budget import budget_of
    from fusewright.verify.verify import verify_respondent

    console = Console()
    where = resolve_device(device or default_device())
    loaded = load_problem(problem)
    budget = budget_of(where, math.inf if check_s is None else check_s)
    limits = Limits(seconds)
    with Boxed(loaded, model_new, where, limits, confined=not unconfined) as boxed:
        how: dict[str, Any] = {"modes": MODE_NAMES[mode], "budget": budget}
        report = verify_respondent(loaded, lambda model: boxed, where, **how)
    print_checks(console, report.checks)
    print_notes(console, report.notes)
    if json_file:
        record = {
            "problem": loaded.name,
            "candidate": str(model_new),
            "device": device_name(where),
            "versions": versions(),
            "mode": mode,
            "checks": check_records(report.checks),
            "notes": list(report.notes),
            "ok": report.ok,
        }
        write_record(json_file, record)
    if not report.ok:
        fail(f"{model_new}: a check failed", 1)
    console.print(f"[green]{len(report.checks)} checks, all ok[/green]")


@cli.command()
@problem_argument
@click.argument("models_new", metavar="[MODEL_NEW]...", type=PATH, nargs=-1)
@click.option("--json", type=PATH, help=BENCH_JSON_HELP)
@device_option
@click.option("--mode", type=click.Choice(["train", "eval"]), default="train", show_default=True)
@click.option(
    "--pass", "passes", type=click.Choice(sorted(BENCH_PASSES)), default="both", show_default=True
)
@click.option("--baselines", help="Any of eager, compile, max-autotune, cudagraphs.")
@click.option("--quick", is_flag=True, help="Fewer repeats and baselines, no build times.")
@click.option("--budget", "budget_s", type=float, help="Seconds of timing for each pass.")
@click.option("--time-limit", "time_limit_s", type=float, help="Seconds per problem of a folder.")
@click.option("--retry-failed", is_flag=True, help="Run failed problems of a folder again.")
@click.option("--ours", is_flag=True, help="Also optimize if MODEL_NEW files are given.")
@click.option("--html", type=PATH, help="Also write a page.")
@click.option("--png", type=PATH, help="Also write the charts to a folder.")
@seconds_option
@unconfined_option
@algebra_option
def bench(
    problem: Path, device: str | None, passes: str, html: Path | None, png: Path | None, **rest: Any
) -> None:
    """Measure PROBLEM (a file, or a folder of them): eager, torch.compile and ours in one run.

    If PROBLEM is a record (.json), it is drawn again.
    """
    from fusewright.bench.command import Asked, bench_file, bench_folder, draw_again
    from fusewright.page.document import drawer

    asked = Asked(
        problem=problem,
        device=device or default_device(),
        passes=BENCH_PASSES[passes],
        draw=drawer(html, png),
        **rest,
    )
    whole = draw_again if problem.suffix == ".json" else bench_file
    code = (bench_folder if problem.is_dir() else whole)(Console(), asked, _bench_steps)
    if code:
        sys.exit(code)


@contextmanager
def _bench_steps(
    console: Console, names: tuple[str, ...], animated: bool
) -> Iterator[Callable[..., None]]:
    """A progress bar; the function it yields takes a step's name, or what runs within the step."""
    steps = Steps(console, names, animated=animated)
    with steps.running():
        yield lambda name, share: steps.next(name) if name in names else steps.detail(name, share)


@cli.command()
@click.argument("old", type=PATH)
@click.argument("new", type=PATH)
@click.option(
    "--noise",
    type=float,
    default=0.02,
    show_default=True,
    help="Smallest change that counts, 0.02 = 2 %.",
)
def compare(old: Path, new: Path, noise: float) -> None:
    """Show what got faster or slower from OLD to NEW, two JSON records; exit code 1 if slower."""
    from fusewright.bench.command import compare_files

    code = compare_files(Console(), old, new, noise)
    if code:
        sys.exit(code)


cli.add_command(judge)


def solved(
    loaded: Problem,
    where: torch.device,
    mode: str,
    tuning: OnProgress | None,
    progress: OnProgress = lambda words, share: None,
    *,
    keep_words: bool = False,
) -> Solution:
    """A problem, compiled; the kernels of its emitted file are in the cache."""
    from fusewright.compile.file_build import with_kernels_of_file
    from fusewright.compile.solution import solve, warn_of
    from fusewright.verify.feeds import make_inputs

    model, args = loaded.make_model().to(where), make_inputs(loaded, where)
    how: dict[str, Any] = {"modes": MODE_NAMES[mode], "tuning": tuning, "progress": progress}
    solution = solve(model, args, name=loaded.name, build=False, **how)
    warn_of(solution, stacklevel=2, in_a_file=True)
    return with_kernels_of_file(solution, loaded, progress, keep_words=keep_words)


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def fail(message: str, code: int) -> NoReturn:
    click.echo(f"fusewright: {message}", err=True)
    sys.exit(code)


def main() -> None:
    """Run the command line; each of our errors is one message and exit code 2."""
    try:
        cli(standalone_mode=True)
    except FusewrightError as error:
        fail(str(error), 2)
    except (RuntimeError, MemoryError) as error:
        from fusewright.compile.out_of_memory import is_out_of_memory
        from fusewright.verify.budget import no_memory_words

        if not is_out_of_memory(error):
            raise
        fail(no_memory_words(), 2)
    except OSError as error:
        fail(f"{error.filename or ''}: {error.strerror or error}", 2)
