"""Files that cheat, are wrong or do harm are caught; honest ones in many styles are accepted.

Every file in candidates/ names the verdicts that fit it in a line `# verdict: …`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fusewright.judge import process, processes
from fusewright.judge.judge import judge
from fusewright.judge.process import Limits
from fusewright.judge.processes import missing_confinement, with_token
from fusewright.judge.timekeeper import Timing
from fusewright.judge.verdict import Verdict
from tests.judge.all_candidates import MEMORY_BYTES, Candidate, candidates

HERE = candidates("cuda" if torch.cuda.is_available() else "cpu")
HONEST = [each for each in HERE if each.honest]
# Files that surely run a kernel of their own; some others fall back, which is no fault.
WITH_KERNELS = ("compiled_c", "load_inline", "compiled_by_torch", "numpy_result")
MEMORY = "needs much memory"
QUICK = Timing(baselines=("eager",), budget_s=1.0)
LEAK = "keeps memory between calls"
FLAGS = (
    "runs all of the model's own PyTorch operators",
    MEMORY,
    LEAK,
    "ignores the current stream",
    "ignores the mode of a part",
    "degenerate task",
    "has other gradients",
)
needs_box = pytest.mark.skipif(bool(missing_confinement()), reason=missing_confinement() or "-")


def params(which: Sequence[Candidate]) -> list[Any]:
    """A candidate that is timed may meet a busy machine."""
    clock = pytest.mark.by_the_clock
    return [
        pytest.param(each, marks=[clock] if each.timed else [], id=each.path.stem) for each in which
    ]


def judged(candidate: Candidate, *, confined: bool = True) -> Verdict:
    limits = Limits(candidate.seconds, MEMORY_BYTES)
    how = {"limits": limits, "confined": confined, "device": candidate.device or "cpu"}
    how["timing"] = QUICK if candidate.timed else None
    return judge(candidate.problem, candidate.path, **how)  # type: ignore[arg-type]


@needs_box
@pytest.mark.sample(9)
@pytest.mark.parametrize("candidate", params([each for each in HERE if not each.honest]))
def test_exploits_are_caught(candidate: Candidate) -> None:
    verdict = judged(candidate)
    assert verdict.word in candidate.words, verdict.lines()
    assert verdict.reason and verdict.exit_code


@needs_box
@pytest.mark.sample(5)
@pytest.mark.parametrize("candidate", params(HONEST))
def test_honest_files_are_accepted(candidate: Candidate) -> None:
    verdict, path = judged(candidate), candidate.path
    assert verdict.word == "accepted", verdict.lines()
    assert verdict.calls > 40 and verdict.checks > 150
    said = [each for each in FLAGS if any(flag.startswith(each) for flag in verdict.flags)]
    assert set(candidate.flags) <= set(said), verdict.flags
    if path.stem in WITH_KERNELS:
        assert said == list(candidate.flags), verdict.flags
    for each in (MEMORY, LEAK):
        assert (each in said) == (each in candidate.flags), verdict.flags


@pytest.mark.sample(2)
@pytest.mark.parametrize("confined", [pytest.param(True, marks=needs_box), False])
def test_nothing_is_left_running(confined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file accepts a verdict and leaves a process in a session of its own."""
    tokens: list[str] = []
    found: list[int] = []

    def watched(token: str) -> None:
        tokens.append(token)
        found.append(len(with_token(token)))
        processes.end_all(token)

    monkeypatch.setattr(process, "end_all", watched)
    (leaving,) = (each for each in HONEST if each.path.stem == "leaves_processes")
    verdict = judged(leaving, confined=confined)
    assert verdict.word == "accepted", verdict.lines()
    assert found == [0], "the box ends before all of its processes have ended"
    assert with_token(tokens[0]) == []
