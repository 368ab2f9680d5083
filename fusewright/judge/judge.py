"""Judges a ModelNew that somebody else wrote.

This process loads the problem, never the candidate, which runs in a process of its own, in a box.
The first fault ends the judgement.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fusewright.judge.arena import Arena
from fusewright.judge.expectations import Expectations
from fusewright.judge.hearing import Hearing, OnProgress
from fusewright.judge.memory import own_peak
from fusewright.judge.process import CandidateProcess, Limits
from fusewright.judge.processes import require_confinement
from fusewright.judge.timekeeper import Timing
from fusewright.judge.verdict import Verdict
from fusewright.problem.inputs import resolve_device
from fusewright.problem.load import candidate_path, load_problem

MODES = ("train", "eval")


def judge(
    problem: str | Path,
    model_new: str | Path,
    *,
    limits: Limits | None = None,
    confined: bool = True,
    strict: bool = False,
    device: str = "cpu",
    modes: Sequence[str] = MODES,
    timing: Timing | None = None,
    classes: bool = False,
    progress: OnProgress = lambda words, share: None,
) -> Verdict:
    """Judge the `ModelNew` of a file against the `Model` of a problem.

    ConfinementError if this machine cannot confine a process, unless `confined` is false.
    ProblemError if the problem or the model itself is at fault. `strict` makes flags failures.
    With `timing`, a candidate that answers everything rightly is timed beside the baselines. With
    `classes`, results of a lower precision are right as well, and the verdict names the precision.
    """
    start = time.monotonic()
    path = candidate_path(model_new)
    require_confinement(confined)
    where = resolve_device(device)
    loaded = load_problem(problem)
    limits = limits or Limits()
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), own_peak() as mine:
        expectations = Expectations(
            loaded, tuple(modes), secrets.randbits(62), where, classes=classes
        )
        arena = Arena.new(*expectations.arena_bytes())
        try:
            process = CandidateProcess(limits, arena, confined=confined, device=where.type)
            hearing = Hearing(loaded, path, expectations, process, mine)
            fault = hearing.held(progress, timing)
        finally:
            arena.close()
    verdict = hearing.verdict(fault, strict=strict)
    return replace(verdict, seconds=time.monotonic() - start)
