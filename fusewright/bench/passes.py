"""One pass of one problem: check every candidate, time the right ones, check them again.

In between one of the timed calls themselves is checked, so that nobody gains by being right only
when nobody takes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusewright.bench import costs
from fusewright.bench.clock import Clock
from fusewright.bench.flags import steady_flags
from fusewright.bench.floors import floor_of
from fusewright.bench.plan_record import step_times
from fusewright.bench.precision import coarsest
from fusewright.bench.record import (
    PRECISIONS,
    CandidateFacts,
    Floor,
    Pass,
    Rates,
    Ratio,
    Result,
    Settings,
    Timing,
    ValueCheck,
)
from fusewright.bench.reference import Reference, Through
from fusewright.bench.sampling import failure_text, sample
from fusewright.bench.stats import speedup
from fusewright.bench.subjects import Results, Subject
from fusewright.bench.trace import kernel_times, launches, trace_calls
from fusewright.emit.bundle import ProgramPlans
from fusewright.ir.graph import Program
from fusewright.problem.load import Problem

Tick = Callable[[str, float], None]
_MORE_LOOKS = 2
_ELSEWHERE = "works on other streams too: timed from an idle device until all of it is idle again"


@dataclass(frozen=True)
class Stage:
    """What all passes of a problem share; `program` is None (and `note` says why) without floor."""

    problem: Problem
    reference: Reference
    device: torch.device
    clock: Clock
    rates: Rates
    settings: Settings
    program: Program | None
    note: str
    plans: ProgramPlans | None


def run_pass(
    stage: Stage,
    name: str,
    subjects: Mapping[str, Subject],
    facts: Sequence[CandidateFacts],
    tick: Tick,
) -> Pass:
    """Results for every candidate in `facts`: those without a subject could not be built."""
    results = {each.name: _unbuilt(each) for each in facts if each.name not in subjects}
    tick(f"{name}: check", 0.0)
    results.update(check_all(stage, name, subjects, "before"))
    right = {key: each for key, each in subjects.items() if results[key].precision}
    tick(f"{name}: time", 0.0)
    feed = stage.reference.feed
    calls = {key: lambda slot, s=each: s.call(name, slot) for key, each in right.items()}

    def between(names: Sequence[str]) -> None:
        tick(f"check a timed call of {', '.join(names)}", 0.0)
        timed = {key: right[key] for key in names}
        for key, found in check_all(stage, name, timed, "during", _while_timed(stage)).items():
            results[key] = _joined(results[key], found)

    sampled = sample(calls, feed, stage.clock, stage.settings, tick, between)
    for key, words in sampled.failures.items():
        results[key] = Result(key, "failed", words, checks=results[key].checks)
    tick(f"{name}: check again", 0.0)
    stage.reference.stir(list(subjects.values()))
    lasting = {key: right[key] for key in sampled.timings if results[key].precision}
    for key, again in check_all(stage, name, lasting, "after").items():
        results[key] = _joined(results[key], again)
    timings = {key: each for key, each in sampled.timings.items() if results[key].precision}
    floor = _floor(stage, name)
    for key, timing in timings.items():
        results[key] = _timed(results[key], timing, timings, floor, stage)
    tick(f"{name}: profile", 0.0)
    for key in timings:
        results[key] = _profiled(stage, name, subjects[key], results[key])
    ordered = tuple(results[each.name] for each in facts)
    mode, seconds, busy_us = stage.settings.mode, sampled.seconds, sampled.busy_us
    return Pass(name, mode, sampled.rounds, seconds, floor, ordered, busy_us)


def _while_timed(stage: Stage) -> Through:
    """Calls as they are timed: from the outside there is no difference."""

    def through(call: Callable[[], Results]) -> Results:
        kept: list[Results] = []
        stage.clock.sample(lambda: kept.append(call()))
        return kept[0]

    return through


def check_all(
    stage: Stage,
    name: str,
    subjects: Mapping[str, Subject],
    when: str,
    through: Through = lambda call: call(),
) -> dict[str, Result]:
    """Every candidate on an input set that is timed; gradients get a second and a third look.

    Where an output is within rounding of a kink (relu's zero), its gradient may fall on either
    side, as eager's does: such an error comes and goes with the values, one of a coarse product
    stays.
    """
    found = _check_once(stage, name, subjects, when, through)
    for _ in range(_MORE_LOOKS):
        again = {key: subjects[key] for key, each in found.items() if is_doubtful(each)}
        if not again:
            break
        for key, each in _check_once(stage, name, again, when, through).items():
            found[key] = _finer(found[key], each)
    return found


def is_doubtful(result: Result) -> bool:
    """Whether gradients are coarser than what they are the gradients of."""
    others = [each for each in result.checks if not each.name.startswith("grad ")]
    return bool(result.precision) and coarsest(others) not in ("", result.precision)


def _finer(first: Result, second: Result) -> Result:
    """The better of two looks; one that found something wrong stands."""
    if not second.precision:
        return second
    return min(first, second, key=lambda each: PRECISIONS.index(each.precision))


def _check_once(
    stage: Stage, name: str, subjects: Mapping[str, Subject], when: str, through: Through
) -> dict[str, Result]:
    slot = stage.reference.feed.refresh()
    expected = stage.reference.expect(name, slot)
    found: dict[str, Result] = {}
    for key, subject in subjects.items():
        try:
            with steady_flags(key, foreign=subject.candidate.kind == "foreign"):
                checks = stage.reference.check(when, subject, name, slot, expected, through)
        except Exception as error:  # Somebody's code: its failure is its result.
            found[key] = Result(key, "failed", failure_text(error))
            continue
        found[key] = _judged(key, checks)
    return found


def _judged(key: str, checks: tuple[ValueCheck, ...]) -> Result:
    precision = coarsest(checks)
    if precision:
        return Result(key, "timed", precision=precision, checks=checks)
    worst = [each for each in checks if not each.ok]
    if not worst:
        return Result(key, "wrong", "the model gives nothing that could be compared")
    words = "; ".join(f"{each.name} {each.when} timing: {_words(each)}" for each in worst[:3])
    return Result(key, "wrong", words, checks=checks)


def _words(check: ValueCheck) -> str:
    return f"error {check.error:.1e}" + (f" ({check.note})" if check.note else "")


def _unbuilt(facts: CandidateFacts) -> Result:
    status = "skipped" if facts.note.startswith("skipped") else "failed"
    return Result(facts.name, status, facts.note.removeprefix("skipped: "))


def _joined(before: Result, after: Result) -> Result:
    """All checks together: what is wrong or coarse in any is so."""
    checks = before.checks + after.checks
    if after.status == "failed":
        return replace(after, checks=checks)
    return _judged(before.candidate, checks)


def _floor(stage: Stage, name: str) -> Floor | None:
    if stage.program is None:
        return Floor(0, 0, {}, f"no floor: {stage.note}") if stage.note else None
    return floor_of(stage.program, name, stage.rates)


def _timed(
    result: Result,
    timing: Timing,
    timings: Mapping[str, Timing],
    floor: Floor | None,
    stage: Stage,
) -> Result:
    ratios = []
    for baseline in stage.settings.baselines:
        if baseline in timings and baseline != result.candidate:
            theirs = timings[baseline].samples_us
            found = speedup(theirs, timing.samples_us, seed=stage.settings.seed)
            ratios.append(Ratio(baseline, found.value, found.low, found.high))
    floors = floor.floor_us if floor else {}
    least = floors.get(result.precision, floors.get("fp32"))
    share = least / timing.median_us if least is not None else None
    # The ratios compare such a time with those of streams, so a reader has to know.
    note = _ELSEWHERE if timing.counted == "device" else ""
    return replace(result, timing=timing, floor_share=share, ratios=tuple(ratios), note=note)


def _profiled(stage: Stage, name: str, subject: Subject, result: Result) -> Result:
    feed, on_gpu = stage.reference.feed, stage.device.type == "cuda"

    def call() -> object:
        return subject.call(name, 0)

    def renew() -> None:
        feed.fill(0)
        stage.clock.flush()

    try:
        trace = trace_calls(call, renew, subject.model, on_gpu=on_gpu)
        peak = costs.peak_bytes(call, stage.device) if on_gpu else trace.peak_bytes
    except Exception as error:  # The profiler's failure takes no time away.
        words = filter(None, (result.note, f"not profiled: {failure_text(error)}"))
        return replace(result, note="; ".join(words))
    ours = subject.candidate.kind == "ours" and stage.plans is not None
    steps = (
        step_times(stage.plans, name, trace, stage.rates, result.precision)
        if ours and stage.plans
        else ()
    )
    # A CUDA graph's memory is its own pool's, taken when it was recorded.
    recorded = subject.candidate.kind == "cudagraphs"
    return replace(
        result,
        kernels=kernel_times(trace),
        steps=steps,
        kernel_launches=launches(trace),
        peak_bytes=None if recorded else peak,
    )
