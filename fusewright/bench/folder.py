"""Many problems, each in its own process with a time limit, so that none can harm the others.

A finished problem has its record on disk. The same Fusewright does not run it again on the same
machine. A problem that crashes, hangs or is killed gets a record that says so. If the run is
interrupted, finished records stay.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fusewright.bench import storage
from fusewright.bench.environment import is_same_place
from fusewright.bench.record import Environment, Record, Settings
from fusewright.bench.run import problem_facts
from fusewright.errors import ProblemError

_TAIL_CHARACTERS = 400
_ERRORS = 2
_OURS = "fusewright: "


@dataclass(frozen=True)
class Job:
    """One problem of a folder, and the path of its record."""

    problem: Path
    record: Path


@dataclass(frozen=True)
class Limits:
    """The time limit of a problem, and whether problems that failed before run again."""

    seconds: float
    retry_failed: bool = False


def jobs_of(folder: Path, results: Path) -> tuple[Job, ...]:
    """The problems in a folder and its subfolders, sorted by path."""
    files = sorted(each for each in folder.rglob("*.py") if _is_problem(each))
    if not files:
        raise ProblemError(
            f"{folder}: no file in this folder defines get_inputs(); name a folder of problems"
        )
    return tuple(
        Job(each, results / each.relative_to(folder).with_suffix(".json")) for each in files
    )


def _is_problem(path: Path) -> bool:
    if path.stem.endswith("_new") or any(part.startswith(".") for part in path.parts[:-1]):
        return False
    try:
        return "def get_inputs" in path.read_text()
    except UnicodeDecodeError:
        return False


def finished(job: Job, settings: Settings, limits: Limits, here: Environment) -> Record | None:
    """The record of an earlier run of the same problem, settings, code and machine, if any."""
    found = _fitting(job, settings)
    if found is None or found.environment is None or not is_same_place(found.environment, here):
        return None
    return None if limits.retry_failed and found.status != "ok" else found


def _fitting(job: Job, settings: Settings) -> Record | None:
    """The record on disk, if it has this source and these settings."""
    try:
        found = storage.read(job.record)
    except storage.RecordError:
        return None
    if not isinstance(found, Record) or found.settings != settings:
        return None
    same = found.problem.source_sha256 == problem_facts(job.problem).source_sha256
    return found if same else None


def run_jobs(
    jobs: Sequence[Job],
    settings: Settings,
    arguments: Sequence[str],
    limits: Limits,
    here: Environment,
    begin: Callable[[Job], None] = lambda job: None,
) -> Iterator[Record]:
    """Each problem's record, as soon as it is finished; `arguments` go to the child process."""
    for job in jobs:
        begin(job)
        kept = finished(job, settings, limits, here)
        yield kept or run_job(job, settings, arguments, limits, here)


def run_job(
    job: Job, settings: Settings, arguments: Sequence[str], limits: Limits, here: Environment
) -> Record:
    """Run one problem in its own process; a failure there becomes the record."""
    start = time.time()
    command = [sys.executable, "-m", "fusewright", "bench", str(job.problem)]
    command += ["--json", str(job.record), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        code = _wait(command, output.fileno(), limits.seconds)
        output.seek(0)
        words = output.read()
    written = _fitting(job, settings)
    fresh = written is not None and job.record.stat().st_mtime >= start - 1
    if written is not None and fresh and code in (0, 1):
        return written
    failed = Record(
        problem=problem_facts(job.problem),
        settings=settings,
        status="timeout" if code is None else "failed" if code == _ERRORS else "crashed",
        error=_explained(code, words, limits.seconds),
        seconds=time.time() - start,
        environment=here,
    )
    storage.write(job.record, failed)
    return failed


def _wait(command: Sequence[str], output: int, seconds: float) -> int | None:
    """The exit code, or None after the time limit; the child and its own children are ended."""
    # In its own session: compilers that it starts end with it, and Ctrl-C reaches only us.
    child = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": _import_path()},
    )
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _import_path() -> str:
    """The child imports the same Fusewright as this process, whatever its working directory."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))


def _explained(code: int | None, words: str, seconds: float) -> str:
    lines = words.strip().splitlines()
    said = [each for each in lines if each.startswith(_OURS)]
    if code == _ERRORS and said:
        return said[-1].removeprefix(_OURS)
    tail = " ".join(lines[-3:])[-_TAIL_CHARACTERS:]
    if code is None:
        return f"not finished within its time limit of {seconds:g} s; see --time-limit"
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", most often because memory ran out" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}; its last output: {tail}"
    return tail or f"ended with exit code {code}"
