"""Times a candidate that has answered everything rightly beside the baselines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusewright.judge.baselines import BASELINES, EAGER, Baselines
from fusewright.judge.conversation import Conversation
from fusewright.judge.expectations import Expectations
from fusewright.judge.floor import measure_rates
from fusewright.judge.process import CandidateProcess
from fusewright.judge.race import BaselineError, OnReply, Race, Track, fault_of_time, step_of
from fusewright.judge.times import Conditions, PassTimes
from fusewright.judge.verdict import Fault
from fusewright.target.device import precise_name
from fusewright.tune.timing import Cover, host_flush_bytes

_CLOCK = (
    "the judge's own process: from go until the results are in its memory, less an empty request"
)
_DEVICE_CLOCK = "events of the driver on the default stream of an idle device, all streams drained"


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


def time_candidate(
    timing: Timing,
    candidate: Conversation,
    baselines: Baselines,
    expectations: Expectations,
    check: OnReply,
    progress: Callable[[str, float], None],
) -> Timed:
    """Time all passes; the first impossible time ends it."""
    candidate.process.stop()
    started, notes = baselines.ready()
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
    if EAGER not in started:
        return Timed((), conditions, None, notes)
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
            return Timed(tuple(times), conditions, fault, notes)
    return Timed(tuple(times), conditions, None, notes)


def baselines_of(
    timing: Timing | None, expectations: Expectations, candidate: CandidateProcess
) -> Baselines:
    """The baselines of a judgement, as confined as the candidate; none if it takes no times."""
    confined = candidate.confined
    if timing is None:
        return Baselines(expectations, (), (), confined=confined)
    mode = next(iter(expectations.references))
    steps = [step_of(each, mode) for each in _possible(timing.passes, expectations, mode)]
    kinds = tuple(dict.fromkeys((EAGER, *timing.baselines)))
    return Baselines(expectations, kinds, steps, confined=confined)


def _possible(passes: Sequence[str], expectations: Expectations, mode: str) -> list[str]:
    """The passes that PyTorch itself can run again and again."""
    reference = expectations.references[mode]
    trains = bool(reference.tangents) and not reference.untrainable()
    return [each for each in passes if each != "train" or trains]
