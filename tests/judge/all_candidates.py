"""All files in candidates/, judged in parallel: `python -m tests.judge.all_candidates`.

One line for each file says what was expected, what was seen, and how long it took. With `--device
cuda` files for a GPU take part, and files for the CPU do not; `--own` takes those that need a GPU,
and the named ones. `--within` ends all after so many seconds, and says what was not judged.
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
    """One file with the verdicts that fit it, its problem, and the device that it is for.

    A `timed` one shows its fault, or that it has none, only where times are taken. `flags` are
    the beginnings of those that it must get.
    """

    path: Path
    words: tuple[str, ...]
    problem: Path
    device: str
    timed: bool = False
    flags: tuple[str, ...] = ()

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
    timed = re.search(r"^# timed: yes$", text, re.M) is not None
    flags = tuple(re.findall(r"^# flag: (.+)$", text, re.M))
    return Candidate(path, words, problem, device[1].split()[0] if device else "", timed, flags)


@dataclass(frozen=True)
class How:
    """How all files are judged; nothing goes on after the moment `ends`, in seconds since 1970."""

    device: str
    confined: bool
    timed: bool
    ends: float


# The word, the lines of the verdict, the flags that are missing, and seconds.
Seen = tuple[str, str, tuple[str, ...], float]
_LATE, _LEAST_LEFT_S = "not judged in time", 2.0


def _judged(candidate: Candidate, how: How) -> Seen:
    left = how.ends - time.time()
    if left < _LEAST_LEFT_S:
        return _LATE, "", (), 0.0
    import torch

    from fusewright.judge.judge import judge
    from fusewright.judge.process import Limits
    from fusewright.judge.timekeeper import Timing

    torch.set_num_threads(2)
    start = time.monotonic()
    seconds = candidate.seconds
    seconds *= 5.0 if how.device == "cuda" and candidate.seconds < 60 else 1.0
    timed = how.timed or candidate.timed
    try:
        verdict = judge(
            candidate.problem,
            candidate.path,
            limits=Limits(min(seconds, left), MEMORY_BYTES),
            confined=how.confined,
            device=how.device,
            timing=Timing(baselines=("eager",), budget_s=1.0) if timed else None,
        )
    except Exception as error:  # a failure of the judge itself is a result here
        words = f"{type(error).__name__}: {error}"
        return "judge failed", words, (), time.monotonic() - start
    missing = (f for f in candidate.flags if not any(e.startswith(f) for e in verdict.flags))
    hidden = "".join(f"; hidden {each.hidden_us:.0f} µs" for each in verdict.times)
    words = " ".join(verdict.lines()[:4]) + hidden
    if verdict.word == "timed out" and time.time() > how.ends - 1.0:
        return _LATE, words, (), time.monotonic() - start
    return verdict.word, words, tuple(missing), time.monotonic() - start


def _fits(candidate: Candidate, word: str, missing: Sequence[str], device: str) -> bool:
    """On a GPU a file may fail in another way, but a wrong one is never accepted."""
    if candidate.honest:
        return word in candidate.words and not missing
    loosely = device == "cuda" and word not in ("accepted", "judge failed", _LATE)
    return word in candidate.words or loosely


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="files by their stem; all without any")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--honest", action="store_true", help="only files that are right")
    parser.add_argument("--own", action="store_true", help="all files that need this device")
    parser.add_argument("--time", action="store_true", help="take times of all files")
    parser.add_argument("--within", type=float, default=1e6, help="seconds for everything")
    parser.add_argument("--unconfined", action="store_true")
    return parser


def _is_chosen(candidate: Candidate, given: argparse.Namespace) -> bool:
    """Whether a file is among those that the arguments ask for."""
    if given.honest and not candidate.honest:
        return False
    own = given.own and candidate.device == given.device
    everything = not given.names and not given.own
    return own or everything or candidate.path.stem in given.names


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    chosen = [each for each in candidates(given.device) if _is_chosen(each, given)]
    failed, start = 0, time.monotonic()
    how = How(given.device, not given.unconfined, given.time, time.time() + given.within)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawned) as pool:
        work = {pool.submit(_judged, e, how): e for e in chosen for _ in range(given.repeat)}
        for done in as_completed(work):
            candidate, (word, words, missing, seconds) = work[done], done.result()
            fits = _fits(candidate, word, missing, given.device)
            failed += not fits
            mark = "ok  " if fits else "late" if word == _LATE else "FAIL"
            line = f"{mark} {candidate.path.stem}: expected {' or '.join(candidate.words)}"
            lacks = f" without the flag {missing[0]}" if missing else ""
            print(f"{line}, seen {word}{lacks}, {seconds:.1f} s | {words[:300]}", flush=True)
    print(f"{len(work)} judgements, {failed} failed, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
