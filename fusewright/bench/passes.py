"""One pass of one problem: check every candidate, time the right ones, check them again.

In between, one of the timed calls itself is checked: a candidate must not be right only while it is
not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from fusewright.bench import costs
from fusewright.bench.clock import Clock
from fusewright.bench.floors import floor_of
from fusewright.bench.plan_record import step_times
from fusewright.bench.record import (
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
from fusewright.bench.sampling import Tick, failure_text, sample
from fusewright.bench.subjects import BenchSubject
from fusewright.bench.trace import kernel_times, launches, trace_calls
from fusewright.emit.bundle import ProgramPlans
from fusewright.ir.graph import Program
from fusewright.problem.load import Problem
from fusewright.tune.stats import speedup
from fusewright.verify.classes import coarseness, coarsest
from fusewright.verify.compare import Check
from fusewright.verify.flags import steady_flags
from fusewright.verify.reference import Reference, examine, stir
from fusewright.verify.run import Through, ask
from fusewright.verify.scenarios import PLAIN_LAYOUT, Answer, Question, Results, Scenario, asked

_MORE_LOOKS = 2
_ELSEWHERE = "works on other streams too: timed from an idle device until the whole device is idle"


@dataclass(frozen=True)
class Stage:
    """What all passes of a problem share. If `program` is None, `note` says why."""

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
    subjects: Mapping[str, BenchSubject],
    facts: Sequence[CandidateFacts],
    tick: Tick,
) -> Pass:
    """Results of every candidate in `facts`. Candidates without a subject could not be built."""
    results = {each.name: unbuilt(each) for each in facts if each.name not in subjects}
    tick(f"{name}: check", 0.0)
    results.update(check_all(stage, name, subjects, "before"))
    right = {key: each for key, each in subjects.items() if results[key].precision}
    tick(f"{name}: time", 0.0)
    calls = {key: functools.partial(each.call, name == "train") for key, each in right.items()}

    def between(names: Sequence[str]) -> None:
        tick(f"check a timed call of {', '.join(names)}", 0.0)
        timed = {key: right[key] for key in names}
        for key, found in check_all(stage, name, timed, "during", _while_timed(stage)).items():
            results[key] = _joined(results[key], found)

    sampled = sample(calls, stage.reference.feed, stage.clock, stage.settings, tick, between)
    for key, words in sampled.failures.items():
        results[key] = Result(key, "failed", words, checks=results[key].checks)
    tick(f"{name}: check again", 0.0)
    models = [stage.reference.model, *(each.model for each in subjects.values())]
    stir(models, stage.settings.seed + 1)
    lasting = {key: right[key] for key in sampled.timings if results[key].precision}
    for key, again in check_all(stage, name, lasting, "after").items():
        results[key] = _joined(results[key], again)
    timings = {key: each for key, each in sampled.timings.items() if results[key].precision}
    floor = floor_in(stage, name)
    for key, timing in timings.items():
        results[key] = _timed(results[key], timing, timings, floor, stage)
    tick(f"{name}: profile", 0.0)
    for key in timings:
        results[key] = _profiled(stage, name, subjects[key], results[key])
    ordered = tuple(results[each.name] for each in facts)
    mode, seconds, busy_us = stage.settings.mode, sampled.seconds, sampled.busy_us
    return Pass(name, mode, sampled.rounds, seconds, floor, ordered, busy_us)


def skipped_pass(stage: Stage, name: str, facts: Sequence[CandidateFacts], why: str) -> Pass:
    """A pass that PyTorch itself cannot run."""
    results = tuple(Result(each.name, "skipped", why) for each in facts)
    return Pass(name, stage.settings.mode, 0, 0.0, None, results)


def _while_timed(stage: Stage) -> Through:
    """Make the call exactly as it is timed."""

    def through(call: Callable[[], Results]) -> Results:
        kept: list[Results] = []
        stage.clock.sample(lambda: kept.append(call()))
        return kept[0]

    return through


def scenarios(stage: Stage, name: str, when: str) -> list[Scenario]:
    """The verifier's scenarios that belong to a pass before, during or after timing."""
    every = [each for each in asked((stage.settings.mode,)) if each.gradients == (name == "train")]
    if when == "during":
        return [replace(each, layouts=PLAIN_LAYOUT) for each in every if not each.name]
    return [each for each in every if each.new_parameters == (when == "after")]


def check_all(
    stage: Stage,
    name: str,
    subjects: Mapping[str, BenchSubject],
    when: str,
    through: Through = lambda call: call(),
) -> dict[str, Result]:
    """Check every candidate until it is wrong; PyTorch itself only in scenarios that are timed."""
    found: dict[str, Result] = {}
    for scenario in scenarios(stage, name, when):
        taking = {
            key: each
            for key, each in subjects.items()
            if (key not in found or found[key].precision)
            and not (scenario.alter and each.candidate.trusted)
        }
        for key, result in _check_scenario(stage, scenario, taking, when, through, found).items():
            found[key] = _joined(found[key], result) if key in found else result
    return found


def _check_scenario(
    stage: Stage,
    scenario: Scenario,
    subjects: Mapping[str, BenchSubject],
    when: str,
    through: Through,
    before: Mapping[str, Result],
) -> dict[str, Result]:
    """Doubtful results get a second and a third look, and the finest class counts.

    Within rounding of a kink (relu's zero) a gradient may fall on either side, as eager's does.
    Such an error depends on the values; the error of a coarse matmul stays.
    """
    found = _check_once(stage, scenario, subjects, when, through) if subjects else {}
    for _ in range(_MORE_LOOKS):
        again = {
            key: subjects[key]
            for key, each in found.items()
            if is_doubtful(each, before.get(key, each))
        }
        if not again:
            break
        for key, each in _check_once(stage, scenario, again, when, through).items():
            finer = coarseness(each.precision) < coarseness(found[key].precision)
            if finer or not each.precision:  # a wrong result counts
                found[key] = each
    return found


def is_doubtful(result: Result, usual: Result) -> bool:
    """Whether a result is right, but coarser than the outputs of the usual one."""
    outputs = coarsest([each.precision for each in usual.checks if "grad " not in each.name])
    return bool(result.precision) and coarseness(result.precision) > coarseness(outputs)


def _check_once(
    stage: Stage,
    scenario: Scenario,
    subjects: Mapping[str, BenchSubject],
    when: str,
    through: Through,
) -> dict[str, Result]:
    feed, reference = stage.reference.feed, stage.reference
    slot = feed.refresh()
    if all(each.candidate.trusted for each in subjects.values()):
        scenario = replace(scenario, layouts=PLAIN_LAYOUT)
    expected = reference.expect(scenario, feed.values(slot), slot=slot, classes=True)
    if expected is None:
        return {}
    found: dict[str, Result] = {}
    for key, subject in subjects.items():
        trusted = subject.candidate.trusted

        def answer(question: Question, layout: str, mine: BenchSubject = subject) -> Answer:
            # PyTorch's own compilers may change flags.
            with nullcontext() if mine.candidate.trusted else steady_flags(mine.candidate.name):
                return ask(mine, question, (layout,), slot=slot, through=through)

        try:
            checks = examine(expected, answer, PLAIN_LAYOUT if trusted else None)
        except Exception as error:  # a candidate's failure is its result
            found[key] = Result(key, "failed", failure_text(error))
            continue
        found[key] = _judged(key, tuple(_recorded(each, when, scenario) for each in checks))
    return found


def _recorded(check: Check, when: str, scenario: Scenario) -> ValueCheck:
    name = f"{scenario.name}: {check.name}" if scenario.name else check.name
    errors = (check.error, check.eager_error, check.largest)
    ok = bool(check.precision)
    return ValueCheck(when, name, *errors, check.limits, check.precision, ok, check.note)


def _judged(key: str, checks: tuple[ValueCheck, ...]) -> Result:
    precision = coarsest([each.precision for each in checks])
    if precision:
        return Result(key, "timed", precision=precision, checks=checks)
    wrong = [each for each in checks if not each.ok]
    if not wrong:
        return Result(key, "wrong", "the model returns nothing that could be compared")
    words = (
        f"{each.name} {each.when} timing: error {each.error:.1e}"
        + (f" ({each.note})" if each.note else "")
        for each in wrong[:3]
    )
    return Result(key, "wrong", "; ".join(words), checks=checks)


def unbuilt(facts: CandidateFacts) -> Result:
    """The result of a candidate that could not be made; its facts say why."""
    status = "skipped" if facts.note.startswith("skipped") else "failed"
    return Result(facts.name, status, facts.note.removeprefix("skipped: "))


def _joined(before: Result, after: Result) -> Result:
    """The verdict on the checks of both together."""
    checks = before.checks + after.checks
    if after.status == "failed":
        return replace(after, checks=checks)
    return _judged(before.candidate, checks)


def floor_in(stage: Stage, name: str) -> Floor | None:
    """The floor of a pass, or a note that says why there is none."""
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
    # The ratios compare this time with those of a stream, so the reader is told.
    note = _ELSEWHERE if timing.counted == "device" else ""
    return replace(result, timing=timing, floor_share=share, ratios=tuple(ratios), note=note)


def _profiled(stage: Stage, name: str, subject: BenchSubject, result: Result) -> Result:
    feed, on_gpu = stage.reference.feed, stage.device.type == "cuda"

    def call() -> object:
        return subject.call(name == "train", 0)

    def renew() -> None:
        feed.fill(0)
        stage.clock.flush()

    try:
        trace = trace_calls(call, renew, subject.model, on_gpu=on_gpu)
        peak = costs.peak_bytes(call, stage.device) if on_gpu else trace.peak_bytes
    except Exception as error:  # without a profile the times still hold
        words = filter(None, (result.note, f"not profiled: {failure_text(error)}"))
        return replace(result, note="; ".join(words))
    plans = stage.plans if subject.candidate.kind == "ours" else None
    steps = step_times(plans, name, trace, stage.rates, result.precision) if plans else ()
    # A CUDA graph has its own memory pool, allocated when it was recorded.
    recorded = subject.candidate.kind == "cudagraphs"
    return replace(
        result,
        kernels=kernel_times(trace),
        steps=steps,
        kernel_launches=launches(trace),
        peak_bytes=None if recorded else peak,
    )
