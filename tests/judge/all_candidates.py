"""All files in candidates/, judged in parallel: `python -m tests.judge.all_candidates`.

One line for each file says what was expected, what was seen, and how long it took. With `--device
cuda` files for a GPU take part, and files for the CPU do not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "candidates"
SECONDS = 240.0  # compilers take their time on a busy machine
HANG_SECONDS = 4.0
MEMORY_BYTES = 6 << 30


@dataclass(frozen=True)
class Candidate:
    """One file with the verdicts that fit it, its problem, and the device that it is for."""

    path: Path
    words: tuple[str, ...]
    problem: Path
    device: str

    @property
    def honest(self) -> bool:
        return "accepted" in self.words

    @property
    def seconds(self) -> float:
        return HANG_SECONDS if self.words == ("timed out",) else SECONDS


def candidates(device: str) -> tuple[Candidate, ...]:
    """The files that this device can run, by name."""
    found = map(_candidate, sorted(FOLDER.glob("*.py")))
    return tuple(each for each in found if each and each.device in ("", device))


def _candidate(path: Path) -> Candidate | None:
    text = path.read_text()
    verdict = re.search(r"^# verdict: (.+)$", text, re.M)
    if verdict is None:
        return None
    words = tuple(word.replace("-", " ") for word in verdict[1].split())
    base = re.search(r"^from (\w+) import .*\bModel\b", text, re.M)
    device = re.search(r"^# device: (.+)$", text, re.M)
    problem = FOLDER / f"{base[1] if base else 'small'}.py"
    return Candidate(path, words, problem, device[1].split()[0] if device else "")


def _judged(
    candidate: Candidate, device: str, confined: bool, timed: bool
) -> tuple[str, str, float]:
    import torch

    from fusewright.judge.judge import judge
    from fusewright.judge.process import Limits
    from fusewright.judge.timekeeper import Timing

    torch.set_num_threads(2)
    start = time.monotonic()
    seconds = candidate.seconds * (5.0 if device == "cuda" and candidate.seconds < 60 else 1.0)
    try:
        verdict = judge(
            candidate.problem,
            candidate.path,
            limits=Limits(seconds, MEMORY_BYTES),
            confined=confined,
            device=device,
            timing=Timing(baselines=("eager",), budget_s=1.0) if timed else None,
        )
    except Exception as error:  # a failure of the judge itself is a result here
        return "judge failed", f"{type(error).__name__}: {error}", time.monotonic() - start
    return verdict.word, " ".join(verdict.lines()[:4]), time.monotonic() - start


def _fits(candidate: Candidate, word: str, device: str) -> bool:
    """On a GPU a file may fail in another way, but a wrong one is never accepted."""
    if candidate.honest:
        return word in candidate.words
    loosely = device == "cuda" and word not in ("accepted", "judge failed")
    return word in candidate.words or loosely


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="files by their stem; all without any")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--honest", action="store_true", help="only files that are right")
    parser.add_argument("--time", action="store_true", help="take times as well")
    parser.add_argument("--unconfined", action="store_true")
    given = parser.parse_args(arguments)
    chosen = [
        each
        for each in candidates(given.device)
        if (not given.names or each.path.stem in given.names) and (each.honest or not given.honest)
    ]
    failed, start = 0, time.monotonic()
    how = (given.device, not given.unconfined, given.time)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawned) as pool:
        work = {pool.submit(_judged, e, *how): e for e in chosen for _ in range(given.repeat)}
        for done in as_completed(work):
            candidate, (word, words, seconds) = work[done], done.result()
            fits = _fits(candidate, word, given.device)
            failed += not fits
            expected = " or ".join(candidate.words)
            mark = "ok  " if fits else "FAIL"
            line = (
                f"{mark} {candidate.path.stem}: expected {expected}, seen {word}, {seconds:.1f} s"
            )
            print(f"{line} | {words[:240]}", flush=True)
    print(f"{len(work)} judgements, {failed} failed, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
