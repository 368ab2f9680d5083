"""`make mutations`: whether the tests find the deliberate bugs of tests/mutations.

Each bug goes into a copy of the tree, alone. The tests that should find it run there, and end at
the first failure. That test must then pass without the bug; otherwise it is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation

LIMIT_S = 900  # of one run of tests
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - (.*))?$", re.MULTILINE)
_NOT_CPP = re.compile(r"^\S+\.(?:hpp|cuh|cpp|cu):\d+:\d+: (?:fatal )?error: .*$", re.MULTILINE)
_NO_TESTS = 5  # pytest's status


@dataclass(frozen=True)
class Outcome:
    """What became of a bug. `by` is the test that found it, or what is wrong with the bug."""

    mutation: Mutation
    found: bool
    by: str
    seconds: float

    def __str__(self) -> str:
        how = "found    " if self.found else "NOT FOUND"
        return f"{how} {self.seconds:5.0f} s  {self.mutation.name}: {self.by}"


class Copy:
    """A copy of the tree, whose tests can be run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        if (ROOT / ".venv").exists():
            (folder / ".venv").symlink_to((ROOT / ".venv").resolve())

    def tried(self, mutation: Mutation) -> Outcome:
        """Whether the tests find it."""
        start = time.perf_counter()
        found, by = False, "by none of " + ", ".join(mutation.tests)
        for words in mutation.tests:
            failed, output = self._failed_with(mutation, shlex.split(words))
            if wrong := _NOT_CPP.search(output):
                found, by = False, f"it does not compile: {wrong.group()}"
                break
            if failed:
                found, by = True, failed
                break
        return Outcome(mutation, found, by, time.perf_counter() - start)

    def _failed_with(self, mutation: Mutation, tests: list[str]) -> tuple[str, str]:
        """The first test that fails with the bug and passes without it, and what was printed."""
        place = self.folder / mutation.file
        right = place.read_text()
        while True:
            place.write_text(mutation.applied(self.folder))
            failed, output = self._failed(tests)
            place.write_text(right)
            if "::" not in failed or not self._failed([failed])[0]:
                return failed, output
            print(f"{failed} fails without any bug", file=sys.stderr, flush=True)
            tests = [*tests, "--deselect", failed]

    def _failed(self, tests: Sequence[str]) -> tuple[str, str]:
        """The first test that fails, or empty; and what pytest printed."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["-m", "not gpu and not slow", *tests]
        own = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        own["FUSEWRIGHT_CACHE"] = os.environ.get("FUSEWRIGHT_CACHE", str(self.folder / ".kernels"))
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"{shlex.join(tests)} (not done after {LIMIT_S} s)", ""
        if done.returncode in (0, _NO_TESTS):
            return "", done.stdout
        named = _FAILED.search(done.stdout)
        ended = f"{shlex.join(tests)} (pytest ended with status {done.returncode})"
        return (named[1] if named else ended), done.stdout


@click.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", default=1, help="bugs at a time, each with a copy of the tree")
@click.option("--list", "listed", is_flag=True, help="show the bugs; run nothing")
def main(names: Sequence[str], jobs: int, listed: bool) -> None:
    """Try all bugs, or those whose names begin with one of these NAMES."""
    chosen = [each for each in MUTATIONS if not names or each.name.startswith(tuple(names))]
    chosen.sort(
        key=lambda each: next((at for at, x in enumerate(names) if each.name.startswith(x)), 0)
    )
    if listed:
        for each in chosen:
            print(f"{each.name} ({each.file}): {each.why}")
        return
    missed = [each for each in outcomes(chosen, jobs) if not each.found]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} bugs are found")
    sys.exit(1 if missed else 0)


def outcomes(chosen: Sequence[Mutation], jobs: int) -> Iterator[Outcome]:
    """Each bug's outcome, printed as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        free: SimpleQueue[Copy] = SimpleQueue()
        for at in range(jobs):
            free.put(Copy(Path(folder, str(at))))

        def tried(mutation: Mutation) -> Outcome:
            copy = free.get()
            try:
                outcome = copy.tried(mutation)
            finally:
                free.put(copy)
            print(outcome, flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(tried, chosen)


if __name__ == "__main__":
    main()
