"""Starts the baselines, and times a candidate that has answered everything rightly."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusewright.judge.arena import Arena
from fusewright.judge.calls import COMPILED
from fusewright.judge.conversation import Conversation
from fusewright.judge.expectations import Expectations
from fusewright.judge.floor import measure_rates
from fusewright.judge.process import CandidateProcess, Ended, Late, Limits
from fusewright.judge.race import EAGER, BaselineError, OnReply, Race, Track, fault_of_time
from fusewright.judge.requests import load_request, weights_request
from fusewright.judge.times import Conditions, PassTimes
from fusewright.judge.verdict import Fault
from fusewright.judge.wire import BadMessage
from fusewright.problem.load import Problem
from fusewright.target.device import precise_name
from fusewright.tune.timing import Cover, host_flush_bytes

BASELINES = (EAGER, *COMPILED)
_CLOCK = (
    "the judge's own process: from go until the results are in its memory, less an empty request"
)
_DEVICE_CLOCK = "events of the driver on the default stream of an idle device, all streams drained"
_BASELINE_S = 600.0


@dataclass(frozen=True)
class Timing:
    """How a candidate is timed: beside which baselines, and for how many seconds each pass."""

    baselines: tuple[str, ...] = BASELINES[:2]
    passes: tuple[str, ...] = ("forward", "train")
    budget_s: float = 4.0


@dataclass(frozen=True)
class Timed:
    """The times, what they hold for, and the fault of an impossible one."""

    times: tuple[PassTimes, ...]
    conditions: Conditions
    fault: Fault | None
    notes: tuple[str, ...]


@contextmanager
def _baseline(
    kind: str, problem: Problem, expectations: Expectations, chance: random.Random, confined: bool
) -> Iterator[Conversation]:
    """A process with the problem's own model, under the protocol of the candidate's."""
    arena = Arena.new(*expectations.arena_bytes())
    how: dict[str, Any] = {"confined": confined, "device": expectations.device.type}
    try:
        with CandidateProcess(Limits(_BASELINE_S), arena, **how) as process:
            talk = Conversation(process, chance)
            try:
                _prepare(talk, kind, problem, expectations)
            except (Ended, Late, BadMessage) as error:
                words = str(error) or type(error).__name__
                raise BaselineError(f"{kind} failed: {words}") from error
            yield talk  # what goes wrong from here on may be the candidate's doing
    finally:
        arena.close()


def _prepare(talk: Conversation, kind: str, problem: Problem, expectations: Expectations) -> None:
    """The process has the model with the judge's weights, and stands still."""
    talk.process.started()
    path = Path(problem.path or "").absolute()
    for doing, request in (
        ("loading", load_request(path, problem, kind)),
        ("weights", weights_request(expectations.model)),
    ):
        header, _ = talk.ask(doing, request)
        if "error" in header:
            raise BaselineError(f"{kind} failed: {header['error']['words']}")
    talk.process.stop()


def time_candidate(
    timing: Timing,
    candidate: Conversation,
    problem: Problem,
    expectations: Expectations,
    check: OnReply,
    progress: Callable[[str, float], None],
) -> Timed:
    """Time all passes; the first impossible time ends it."""
    candidate.process.stop()
    chance = random.Random(expectations.chance.getrandbits(62))
    where = expectations.device
    rates, on_gpu = measure_rates(where), where.type == "cuda"
    cover = Cover(host_flush_bytes(), torch.device("cpu"))
    mode = next(iter(expectations.references))
    conditions = Conditions(
        device=precise_name(where),
        clock=_DEVICE_CLOCK if on_gpu else _CLOCK,
        threads=torch.get_num_threads(),
        flushed_bytes=cover.bytes,
        copy_bytes_per_s=rates.copy_bytes_per_s,
        operations_per_s=rates.operations_per_s,
    )
    times: list[PassTimes] = []
    notes: list[str] = []
    with ExitStack() as stack:
        started = {}
        for kind in dict.fromkeys((EAGER, *timing.baselines)):
            facts = (kind, problem, expectations, chance, candidate.process.confined)
            try:
                started[kind] = stack.enter_context(_baseline(*facts))
            except BaselineError as error:
                notes.append(str(error))
        if EAGER not in started:
            return Timed((), conditions, None, tuple(notes))
        least = expectations.least_bytes(mode)
        budget = timing.budget_s
        track = Track(
            candidate, started, expectations, cover.write, rates, least, chance, budget, check
        )
        for name in _possible(timing.passes, expectations, mode):
            progress(f"{name}: time", 1.0)
            try:
                times.append(Race(track, name, mode).run())
            except BaselineError as error:
                return Timed(tuple(times), conditions, None, (*notes, str(error)))
            if (fault := fault_of_time(times[-1])) is not None:
                return Timed(tuple(times), conditions, fault, tuple(notes))
    return Timed(tuple(times), conditions, None, tuple(notes))


def _possible(passes: Sequence[str], expectations: Expectations, mode: str) -> list[str]:
    """The passes that PyTorch itself can run again and again."""
    reference = expectations.references[mode]
    trains = bool(reference.tangents) and not reference.untrainable()
    return [each for each in passes if each != "train" or trains]
