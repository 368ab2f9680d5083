"""The commands `bench` and `compare`: from arguments to files, tables and an exit code.

Exit codes: 0 if all is right, 1 if a candidate is wrong or failed (for `compare`: if something got
slower), 2 (raised as an error of ours) if the input cannot be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fusewright.bench import folder, storage, table
from fusewright.bench.environment import look_around, this_command
from fusewright.bench.judged import Box
from fusewright.bench.record import BASELINES, Record, Settings
from fusewright.bench.regressions import changes, differences
from fusewright.bench.run import bench, phases
from fusewright.bench.summary import collect, is_good
from fusewright.errors import ProblemError
from fusewright.judge.process import Limits
from fusewright.problem.inputs import resolve_device

# A progress bar over named steps. It is not animated while this process takes times.
Steps = Callable[[Console, tuple[str, ...], bool], AbstractContextManager[Callable[..., None]]]

_QUICK = {"least_rounds": 7, "input_sets": 3}
_BUDGET_S = {True: 2.0, False: 10.0}
_TIME_LIMIT_S = {True: 300.0, False: 1800.0}
_INTERRUPTED = 130


@dataclass(frozen=True)
class Asked:
    """The command's arguments; None if the user leaves the choice to us."""

    problem: Path
    models_new: tuple[Path, ...]
    json: Path | None
    device: str
    mode: str
    passes: tuple[str, ...]
    baselines: str | None
    quick: bool
    budget_s: float | None
    time_limit_s: float | None
    retry_failed: bool
    ours: bool = False
    seconds: float = 300.0
    unconfined: bool = False
    draw: Callable[[Sequence[Record]], Sequence[Path]] = lambda records: ()


def settings_of(asked: Asked) -> Settings:
    """The settings, with every choice made."""
    budget = _BUDGET_S[asked.quick] if asked.budget_s is None else asked.budget_s
    for name, seconds in (("--budget", budget), ("--time-limit", asked.time_limit_s)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise ProblemError(f"{name} is {seconds:g}: give a number of seconds above 0")
    return Settings(
        device=asked.device,
        mode=asked.mode,
        passes=asked.passes,
        baselines=_baselines(asked),
        quick=asked.quick,
        budget_s=budget,
        **(_QUICK if asked.quick else {}),
    )


def _baselines(asked: Asked) -> tuple[str, ...]:
    if asked.baselines is None:
        # On a CPU max-autotune takes minutes to build, and CUDA graphs do not exist.
        every: tuple[str, ...] = BASELINES if asked.device == "cuda" else BASELINES[:2]
        # Files are timed in processes of their own, where CUDA graphs are not recorded.
        every = every[:3] if asked.models_new else every
        return BASELINES[:2] if asked.quick else every
    names = tuple(dict.fromkeys(filter(None, map(str.strip, asked.baselines.split(",")))))
    for name in names:
        if name not in BASELINES:
            known = ", ".join(BASELINES)
            raise ProblemError(f"there is no baseline {name!r}: choose from {known}")
    return names


def bench_file(console: Console, asked: Asked, steps: Steps) -> int:
    """Measure one problem, print its tables and write its record."""
    settings = settings_of(asked)
    if asked.json:
        storage.require_writable(asked.json)
    optimizes = asked.ours or not asked.models_new
    names = phases(settings, optimizes=optimizes, models_new=asked.models_new)
    box = Box(Limits(asked.seconds), confined=not asked.unconfined)
    with steps(console, names, False) as tick:
        record = bench(
            asked.problem,
            asked.models_new,
            settings,
            command=this_command(),
            optimizes=optimizes,
            box=box,
            tick=tick,
        )
    table.print_record(console, record)
    if asked.json:
        storage.write(asked.json, record)
        _say_written(console, [asked.json])
    _say_written(console, asked.draw([record]))
    return 0 if is_good(record) else 1


def draw_again(console: Console, asked: Asked, steps: Steps) -> int:
    """Print the tables of an existing record, and draw its page and charts; measures nothing."""
    if asked.models_new or asked.json:
        raise ProblemError(
            f"{asked.problem}: this is a record, which can only be drawn; use --html or --png"
        )
    records = storage.read_records(asked.problem)
    if len(records) == 1:
        table.print_record(console, records[0])
    else:
        table.print_collection(console, collect(records))
    _say_written(console, asked.draw(records))
    return 0


def _say_written(console: Console, paths: Sequence[Path]) -> None:
    for path in paths:
        console.print(f"[bold]{escape(str(path))}[/bold] written.", soft_wrap=True)


def bench_folder(console: Console, asked: Asked, steps: Steps) -> int:
    """Measure every problem of a folder, each in its own process; finished ones are kept."""
    if asked.models_new:
        raise ProblemError("ModelNew files go with one problem: give a problem file, not a folder")
    if asked.json is None:
        raise ProblemError(
            "a folder of problems needs --json: name a folder, or a file, for its records"
        )
    here = look_around(resolve_device(asked.device), this_command())
    settings = settings_of(asked)
    # The file of all records, and the folder of single ones.
    path = asked.json
    single = path.suffix == ".json"
    whole, results = (path, path.with_suffix("")) if single else (path / "all.json", path)
    storage.require_writable(whole)
    storage.require_writable(results / "record.json")
    jobs = folder.jobs_of(asked.problem, results)
    seconds = asked.time_limit_s or _TIME_LIMIT_S[asked.quick]
    limits = folder.Limits(seconds, asked.retry_failed)
    kept = sum(bool(folder.finished(each, settings, limits, here)) for each in jobs)
    if kept:
        words = "same problem, settings, Fusewright and machine"
        console.print(f"Kept from an earlier run ({words}): {kept}.", soft_wrap=True)
    names = tuple(str(job.problem) for job in jobs)
    records: list[Record] = []
    try:
        with steps(console, names, True) as tick:
            begin = lambda job: tick(str(job.problem), 0.0)  # noqa: E731
            given = _arguments(asked)
            for record in folder.run_jobs(jobs, settings, given, limits, here, begin):
                records.append(record)
    except KeyboardInterrupt:
        done = f"{len(records)} of {len(jobs)} problems are in {results}"
        console.print(f"Interrupted: {done}; the same command continues there.", soft_wrap=True)
        return _INTERRUPTED
    collection = collect(records)
    table.print_collection(console, collection)
    storage.write(whole, collection)
    _say_written(console, [whole, *asked.draw(collection.records)])
    return 0 if all(map(is_good, records)) else 1


def _arguments(asked: Asked) -> list[str]:
    """The child's arguments: everything that decides its settings."""
    passes = asked.passes[0] if len(asked.passes) == 1 else "both"
    given = ["--device", asked.device, "--mode", asked.mode, "--pass", passes]
    given += ["--baselines", asked.baselines] if asked.baselines is not None else []
    given += ["--budget", str(asked.budget_s)] if asked.budget_s is not None else []
    return given + (["--quick"] if asked.quick else [])


def compare_files(console: Console, old: Path, new: Path, noise: float) -> int:
    """Print what changed; 1 if something of ours got slower, lost its time or its precision."""
    before, after = storage.read_records(old), storage.read_records(new)
    found = changes(before, after, noise=noise)
    if not found:
        raise storage.RecordError(f"{old} and {new}: no candidate has a time; nothing to compare")
    table.print_changes(console, found, differences(before, after))
    worse = sum(each.is_regression for each in found)
    better = sum(each.counts and each.verdict == "faster" for each in found)
    moved = sum(not each.counts and each.verdict in ("faster", "slower") for each in found)
    if moved:
        words = f"{moved} times of baselines changed, too, so the machine may have changed"
        console.print(f"[yellow]Warning[/yellow]: {words}.", soft_wrap=True)
    console.print(f"{better} faster, {worse} slower or lost, {len(found)} compared.")
    return 1 if worse else 0
