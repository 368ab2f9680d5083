"""Files that somebody hands to `bench`: each is judged, and timed under the judge's protocol.

Nothing of them runs in this process. The record is the same as that of our own candidates, less
what only code inside their process could tell: kernels, launches, the time of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusewright.bench.record import (
    CandidateFacts,
    ClockFacts,
    Costs,
    Floor,
    Pass,
    Ratio,
    Result,
    Settings,
    Timing,
)
from fusewright.bench.sampling import Tick
from fusewright.bench.subjects import Candidate
from fusewright.judge.baselines import BASELINES, EAGER
from fusewright.judge.judge import judge
from fusewright.judge.process import Limits
from fusewright.judge.timekeeper import Timing as JudgesTiming
from fusewright.judge.times import CANDIDATE, PassTimes, Times
from fusewright.judge.verdict import Verdict
from fusewright.problem.load import Problem

_STATUS = {"crashed": "failed", "timed out": "failed"}
_NOT_HERE = "it is not timed beside files; name no file to time it"
_NO_TIME = "this pass has no times: PyTorch itself cannot run it twice, or eager failed"


@dataclass(frozen=True)
class Box:
    """How files run: what they may use, and whether they are confined."""

    limits: Limits
    confined: bool = True


@dataclass(frozen=True)
class Judged:
    """Each candidate's verdict."""

    verdicts: Mapping[Candidate, Verdict]
    settings: Settings

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((EAGER, *self.settings.baselines)))

    def clock(self, cache_bytes: int) -> ClockFacts:
        conditions = (each.conditions for each in self.verdicts.values())
        known = next((each for each in conditions if each), None)
        kind, flushed = (known.clock, known.flushed_bytes) if known else ("the judge's clock", 0)
        return ClockFacts(kind, cache_bytes, flushed, 0.0)

    def facts(self) -> tuple[CandidateFacts, ...]:
        known = [CandidateFacts(each, each, note=_missing(each)) for each in self.baselines]
        for each, verdict in self.verdicts.items():
            path = str(each.path) if each.kind == "foreign" else ""
            size = each.path.stat().st_size if each.path else None
            costs = Costs(cold_build_seconds=verdict.build_seconds, file_bytes=size)
            known.append(CandidateFacts(each.name, each.kind, path, costs=costs))
        return tuple(known)

    def measured(self, name: str, floor: Floor | None, lost: Sequence[Result] = ()) -> Pass:
        """One pass: the baselines as the first accepted file met them, and every file.

        `lost` are the results of candidates that have no file.
        """
        races = {
            each: next((race for race in verdict.times if race.name == name), None)
            for each, verdict in self.verdicts.items()
        }
        first = next((race for race in races.values() if race), None)
        own = next((v.precisions[EAGER] for v in self.verdicts.values() if v.precisions), "")
        results = [*lost, *(self._baseline(each, first, own, floor) for each in self.baselines)]
        results += [
            self._result(each, verdict, races[each], floor)
            for each, verdict in self.verdicts.items()
        ]
        rounds = max((race.rounds for race in races.values() if race), default=0)
        return Pass(name, self.settings.mode, rounds, 0.0, floor, tuple(results))

    def _baseline(self, name: str, race: PassTimes | None, own: str, floor: Floor | None) -> Result:
        found = race.of(name) if race else None
        if found is None:
            words = _missing(name) or "no file was right, so nothing was timed beside it"
            return Result(name, "skipped", words.removeprefix("skipped: "))
        timing = self._timing(found)
        return Result(name, "timed", "", own, timing, _share(floor, own, timing))

    def _result(
        self, candidate: Candidate, verdict: Verdict, race: PassTimes | None, floor: Floor | None
    ) -> Result:
        if not verdict.accepted:
            status = _STATUS.get(verdict.word, "wrong")
            return Result(candidate.name, status, f"{verdict.word}: {verdict.reason}")
        found = race.of(CANDIDATE) if race else None
        if race is None or found is None:
            return Result(candidate.name, "skipped", "; ".join(verdict.notes) or _NO_TIME)
        precision, timing = verdict.precisions.get(race.name, ""), self._timing(found)
        return Result(
            candidate.name,
            "timed",
            "; ".join(verdict.flags),
            precision,
            timing,
            _share(floor, precision, timing),
            tuple(Ratio(e.baseline, e.value, e.low, e.high) for e in race.speedups),
            peak_bytes=verdict.peak_bytes.get(race.name),
        )

    def _timing(self, found: Times) -> Timing:
        settings, samples = self.settings, found.samples_us
        width = (found.high_us - found.low_us) / found.median_us if found.median_us else 1.0
        converged = width < settings.target_width and len(samples) >= settings.least_rounds
        counted = "stream" if settings.device == "cuda" else "wall"
        spread = (found.median_us, found.low_us, found.high_us, min(samples))
        return Timing(samples, *spread, converged, counted)


def judge_all(
    problem: Problem, candidates: Sequence[Candidate], settings: Settings, box: Box, tick: Tick
) -> Judged:
    """Judge and time every file, one after the other."""
    names = tuple(each for each in settings.baselines if each in BASELINES)
    timing = JudgesTiming(names, settings.passes, settings.budget_s)
    assert problem.path is not None
    verdicts = {}
    for each in candidates:
        assert each.path is not None
        tick(step_of(each), 0.0)
        verdicts[each] = judge(
            problem.path,
            each.path,
            limits=box.limits,
            confined=box.confined,
            device=str(torch.device(settings.device).type),
            modes=(settings.mode,),
            timing=timing,
            classes=True,
            progress=_within(each, tick),
        )
    return Judged(verdicts, settings)


def step_of(candidate: Candidate) -> str:
    return f"judge {candidate.name}"


def _within(candidate: Candidate, tick: Tick) -> Callable[[str, float], None]:
    return lambda label, share: tick(f"{candidate.name}: {label}", share)


def _missing(baseline: str) -> str:
    return "" if baseline in BASELINES else f"skipped: {_NOT_HERE}"


def _share(floor: Floor | None, precision: str, timing: Timing) -> float | None:
    floors = floor.floor_us if floor else {}
    least = floors.get(precision, floors.get("fp32"))
    return least / timing.median_us if least is not None and timing.median_us else None
