"""The command line: arguments and progress."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fusewright import __version__
from fusewright.errors import FusewrightError

if TYPE_CHECKING:
    import torch

    from fusewright.bench.record import Record
    from fusewright.compile.solution import Solution
    from fusewright.problem.load import Problem
    from fusewright.report import Outcome
    from fusewright.tune.search import OnProgress

TIMING_BUDGET_S = 6.0
TUNE_STEP = "tune"
STEP_NAMES = ("load the problem", "capture and compile", "check against float64", "time")
MODE_NAMES = {"train": ("train",), "eval": ("eval",), "both": ("train", "eval")}

BENCH_PASSES = {"forward": ("forward",), "train": ("train",), "both": ("forward", "train")}
BENCH_JSON_HELP = "Write the record here; for a folder, a file of all records or a folder of them."

PATH = click.Path(path_type=Path)
problem_argument = click.argument("problem", type=PATH)
device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default=None,
    help="Where to run; a GPU if there is one.",
)
mode_option = click.option(
    "--mode",
    type=click.Choice(sorted(MODE_NAMES)),
    default="both",
    show_default=True,
    help="The model's mode, as train() and eval() set it.",
)
json_option = click.option("--json", "json_file", type=PATH, help="Also write a JSON record.")


class Steps:
    """Progress through named steps: a bar on a terminal, plain lines elsewhere.

    A bar that is not animated is drawn only on updates, at most four times a second: a drawing
    thread would disturb the measurement.
    """

    def __init__(self, console: Console, names: tuple[str, ...], *, animated: bool = True) -> None:
        self.console = console
        self.names = names
        self.animated = animated
        self.drawn = 0.0
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=animated,
            disable=not console.is_terminal,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.progress:
            self.task = self.progress.add_task(self.names[0], total=len(self.names))
            yield

    def next(self, name: str) -> None:
        if not self.console.is_terminal:
            self.console.print(f"{name} …")
        self.progress.update(self.task, description=name, completed=self.names.index(name))
        self._draw(0.0)

    def detail(self, words: str, share: float) -> None:
        """Show what runs within the present step, and how much of the step is done."""
        done = math.floor(self.progress.tasks[self.task].completed)
        self.progress.update(self.task, description=words, completed=done + min(share, 0.99))
        self._draw(0.25)

    def tuning(self, words: str, share: float) -> None:
        """Show what is being tuned; without a bar, on its own line."""
        if self.progress.tasks[self.task].completed < self.names.index(TUNE_STEP):
            self.next(TUNE_STEP)
        self.detail(words, share)
        if not self.console.is_terminal:
            self.console.print(f"  {words} …")

    def _draw(self, pause_s: float) -> None:
        if not self.animated and time.monotonic() >= self.drawn + pause_s:
            self.progress.refresh()
            self.drawn = time.monotonic()


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
@click.option(
    "--tune", is_flag=True, help="Measure schedules of each kernel; use the fastest, now and later."
)
@click.option(
    "--keep-words",
    is_flag=True,
    help="Keep the words pass, try and except, which strict checkers of kernels refuse.",
)
def optimize(
    problem: Path,
    output: Path | None,
    json_file: Path | None,
    device: str | None,
    mode: str,
    tune: bool,
    keep_words: bool,
) -> None:
    """Write a standalone ModelNew for PROBLEM, check it and time it."""
    from fusewright.emit.file import file_text
    from fusewright.problem.inputs import resolve_device
    from fusewright.problem.load import load_problem
    from fusewright.report import header, keep_apart, print_outcome, print_summary, write_json

    console = Console()
    output = output or problem.with_name(f"{problem.stem}_new.py")
    for path in (output, json_file):
        keep_apart(problem, path)
    names = (*STEP_NAMES[:2], TUNE_STEP, *STEP_NAMES[2:]) if tune else STEP_NAMES
    # A drawing thread would disturb the measurement of schedules.
    steps = Steps(console, names, animated=not tune)
    with steps.running():
        steps.next(STEP_NAMES[0])
        where = resolve_device(device or default_device())
        loaded = load_problem(problem)
        steps.next(STEP_NAMES[1])
        solution = solved(loaded, where, mode, steps.tuning if tune else None)
        outcome = checked(loaded, solution, where, mode, output, steps, keep_words)
    print_outcome(console, outcome)
    if json_file:
        write_json(json_file, outcome)
    if not outcome.checks:
        fail(f"{loaded.name}: the model gives nothing to check, so no file was written", 1)
    if not all(check.ok for check in outcome.checks):
        fail(f"{loaded.name}: a check failed, so no file was written", 1)
    text = file_text(solution.bundle, loaded.source, header(outcome), keep_words=keep_words)
    output.write_text(text, encoding="utf-8")
    how = "came from the cache" if solution.cached else f"built in {solution.seconds:.1f} s"
    console.print(f"[bold]{output}[/bold] written; its kernels {how}.", soft_wrap=True)
    print_summary(console, outcome, problem)


def checked(
    loaded: Problem,
    solution: Solution,
    where: torch.device,
    mode: str,
    output: Path,
    steps: Steps,
    keep_words: bool,
) -> Outcome:
    """Check and time the emitted text itself, from a draft of its file."""
    from fusewright.bench.side_by_side import time_models
    from fusewright.emit.file import file_text
    from fusewright.problem.load import candidate_factory
    from fusewright.report import Outcome, draft, header
    from fusewright.target.device import device_name
    from fusewright.verify.verify import verify

    outcome = Outcome(
        problem=loaded.name,
        device=device_name(where),
        mode=mode,
        plans=solution.prepared.modes,
        build_seconds=solution.seconds,
        output=str(output),
        tuned=solution.prepared.tuned,
        left_out=solution.prepared.left_out,
    )
    text = file_text(solution.bundle, loaded.source, header(outcome), keep_words=keep_words)
    with draft(output, text) as path:
        make = candidate_factory(path, loaded)
        steps.next(STEP_NAMES[2])
        report = verify(loaded, make, device=where, modes=MODE_NAMES[mode])
        outcome = replace(outcome, checks=report.checks)
        if not report.ok:
            return outcome
        steps.next(STEP_NAMES[3])
        training = mode != "eval"
        times = time_models(loaded, make, device=where, budget_s=TIMING_BUDGET_S, training=training)
    return replace(outcome, timings_ms=times)


@cli.command()
@problem_argument
@device_option
@mode_option
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
    prepared = prepare(model, args, modes=MODE_NAMES[mode], device=where)
    print_plans(Console(), prepared.modes)


@cli.command()
@problem_argument
@click.argument("model_new", type=PATH)
@json_option
@device_option
@mode_option
def verify(
    problem: Path, model_new: Path, json_file: Path | None, device: str | None, mode: str
) -> None:
    """Check the ModelNew in MODEL_NEW against the Model in PROBLEM."""
    from fusewright.problem.inputs import resolve_device
    from fusewright.problem.load import candidate_factory, load_problem
    from fusewright.report import check_records, print_checks, write_record
    from fusewright.target.device import device_name, versions
    from fusewright.verify.verify import verify as run

    console = Console()
    where = resolve_device(device or default_device())
    loaded = load_problem(problem)
    make = candidate_factory(model_new, loaded)
    report = run(loaded, make, device=where, modes=MODE_NAMES[mode])
    print_checks(console, report.checks)
    if json_file:
        record = {
            "problem": loaded.name,
            "candidate": str(model_new),
            "device": device_name(where),
            "versions": versions(),
            "mode": mode,
            "checks": check_records(report.checks),
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
def bench(
    problem: Path, device: str | None, passes: str, html: Path | None, png: Path | None, **rest: Any
) -> None:
    """Measure PROBLEM (a file, or a folder of them): eager, torch.compile and ours in one run.

    If PROBLEM is a record (.json), it is drawn again.
    """
    from fusewright.bench.command import Asked, bench_file, bench_folder, draw_again

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


def drawer(html: Path | None, png: Path | None) -> Callable[[Sequence[Record]], Sequence[Path]]:
    """A function that draws records; raises now if the files cannot be written."""
    from fusewright.bench import storage
    from fusewright.page.document import charts_png, render

    for path in (html, png and png / "chart.png"):
        if path:
            storage.require_writable(path)

    def draw(records: Sequence[Record]) -> Sequence[Path]:
        if html:
            storage.write_text(html, render(records))
        charts = charts_png(records, png) if png else ()
        return [*([html] if html else []), *charts]

    return draw


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


def solved(loaded: Problem, where: torch.device, mode: str, tuning: OnProgress | None) -> Solution:
    from fusewright.compile.solution import solve
    from fusewright.verify.feeds import make_inputs

    model, args = loaded.make_model().to(where), make_inputs(loaded, where)
    return solve(model, args, name=loaded.name, modes=MODE_NAMES[mode], tuning=tuning)


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
    except OSError as error:
        fail(f"{error.filename or ''}: {error.strerror or error}", 2)
