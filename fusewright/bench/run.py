"""One problem and all candidates: load, build, check, time, check again, profile.

`bench` returns a `Record`. PyTorch and the text that we made a moment ago run in this process, one
interleaved run. If files are given, everybody runs under the judge's protocol instead. An error in
the problem raises before anything is timed. A failure of one candidate becomes its result.
"""

from __future__ import annotations

import datetime
import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fusewright.bench import costs
from fusewright.bench.clock import make_clock
from fusewright.bench.environment import clocks, look_around
from fusewright.bench.floors import measure_rates
from fusewright.bench.judged import Box, judge_all, step_of
from fusewright.bench.passes import Stage, floor_in, run_pass, skipped_pass, unbuilt
from fusewright.bench.plan_record import plan_graphs
from fusewright.bench.record import (
    BASELINES,
    CandidateFacts,
    ClockFacts,
    Clocks,
    Costs,
    Pass,
    ProblemFacts,
    Record,
    Settings,
)
from fusewright.bench.sampling import Tick, failure_text
from fusewright.bench.subjects import BenchSubject, Candidate, load_model, make_subject
from fusewright.capture import capture
from fusewright.compile.solution import Solution, device_of, solve
from fusewright.emit.file import file_text
from fusewright.errors import FusewrightError, ProblemError
from fusewright.judge.process import Limits
from fusewright.judge.processes import require_confinement
from fusewright.outcome import Outcome, header
from fusewright.problem.inputs import named_tensors, resolve_device
from fusewright.problem.load import Problem, candidate_path, load_problem
from fusewright.target.device import device_name
from fusewright.tune import neighbours
from fusewright.verify.feeds import Feed, make_feed
from fusewright.verify.flags import steady_flags
from fusewright.verify.reference import Reference
from fusewright.verify.run import make_model

_TAKEN = (*BASELINES, "ours")
_OURS = Candidate("ours", "ours")


@dataclass(frozen=True)
class Ours:
    """Our own candidate: its emitted file, or the error that prevented it."""

    solution: Solution | None = None
    path: Path | None = None
    seconds: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Measured:
    """What one way of measuring finds; `other_cores` as in the environment."""

    candidates: tuple[CandidateFacts, ...]
    passes: tuple[Pass, ...]
    clock: ClockFacts
    clocks: tuple[Clocks, ...] = ()
    other_cores: float = 0.0


def phases(
    settings: Settings, *, optimizes: bool, models_new: Sequence[Path] = ()
) -> tuple[str, ...]:
    """The names of the steps that are passed to `tick`, in order."""
    names = ["load", *(["optimize"] if optimizes else []), "measure rates"]
    if models_new:
        ours = [step_of(_OURS)] if optimizes else []
        return (*names, *ours, *map(step_of, named_candidates(models_new)))
    names.append("build")
    for each in settings.passes:
        names += [f"{each}: check", f"{each}: time", f"{each}: check again", f"{each}: profile"]
    return (*names, "count costs")


def bench(
    path: Path,
    models_new: Sequence[Path],
    settings: Settings,
    *,
    command: str = "",
    optimizes: bool | None = None,
    box: Box | None = None,
    tick: Tick = lambda name, share: None,
) -> Record:
    """Measure a problem. `optimizes` adds our own module; by default only if no file is given."""
    start, started_at = time.perf_counter(), _now()
    tick("load", 0.0)
    box = box or Box(Limits())
    where = resolve_device(settings.device)
    for each in models_new:
        candidate_path(each)
    given = named_candidates(models_new)
    require_confinement(bool(given) and box.confined)
    problem = load_problem(path)
    with (
        torch.random.fork_rng(devices=[where] if where.type == "cuda" else []),
        tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder,
        nullcontext() if settings.quick else costs.empty_caches(),
    ):
        model = make_model(problem, where, settings.seed).train(settings.mode == "train")
        feed = make_feed(problem, where, sets=settings.input_sets, seed=settings.seed)
        reference = Reference(model, feed, settings.seed, settings.mode)
        wanted = not models_new if optimizes is None else optimizes
        ours = _optimized(problem, model, feed, folder, tick) if wanted else Ours()
        with _compiler(reference):
            tick("measure rates", 0.0)
            environment = look_around(where, command)
            stage, untrainable = _staged(problem, reference, ours, settings)
            clocks_before = clocks(where, "measure rates")
            how = (stage, ours, settings, untrainable, tick)
            found = _in_boxes(given, box, *how) if given else _here(*how)
    environment = replace(
        environment, clocks=(*clocks_before, *found.clocks), other_cores=found.other_cores
    )
    return Record(
        problem=_facts(problem, reference),
        settings=settings,
        started_at=started_at,
        seconds=time.perf_counter() - start,
        environment=environment,
        rates=stage.rates,
        clock=found.clock,
        candidates=found.candidates,
        passes=found.passes,
        plan=plan_graphs(ours.solution.prepared.modes) if ours.solution else (),
    )


def _staged(
    problem: Problem, reference: Reference, ours: Ours, settings: Settings
) -> tuple[Stage, str]:
    """What all passes share, and why there is no training pass."""
    where = resolve_device(settings.device)
    clock = make_clock(where)
    rates = measure_rates(where, clock, quick=settings.quick)
    try:
        program, note = capture(reference.model, reference.feed.masters[0], mode=settings.mode), ""
    except FusewrightError as error:
        program, note = None, failure_text(error)
    plans = ours.solution.prepared.modes[0] if ours.solution else None
    untrainable = reference.untrainable() if "train" in settings.passes else ""
    possible = tuple(each for each in settings.passes if each != "train" or not untrainable)
    timed = replace(settings, passes=possible)
    stage = Stage(problem, reference, where, clock, rates, timed, program, note, plans)
    return stage, untrainable


def _in_boxes(
    given: Sequence[Candidate],
    box: Box,
    stage: Stage,
    ours: Ours,
    settings: Settings,
    untrainable: str,
    tick: Tick,
) -> Measured:
    """Each file in a process of its own, our emitted one as well."""
    emitted = [replace(_OURS, path=ours.path)] if ours.path else []
    judged = judge_all(stage.problem, [*emitted, *given], stage.settings, box, tick)
    failed = [CandidateFacts("ours", "ours", note=ours.failure)] if ours.failure else []
    facts = (*failed, *judged.facts())
    lost = tuple(map(unbuilt, failed))
    passes = tuple(
        judged.measured(name, floor_in(stage, name), lost)
        if name in stage.settings.passes
        else skipped_pass(stage, name, facts, untrainable)
        for name in settings.passes
    )
    return Measured(facts, passes, judged.clock(stage.clock.facts.cache_bytes))


def _here(stage: Stage, ours: Ours, settings: Settings, untrainable: str, tick: Tick) -> Measured:
    """PyTorch and our own text, in this process."""
    subjects, facts = _built(stage, ours, tick)
    passes, others, seen = [], 0.0, list[Clocks]()
    for name in settings.passes:
        if name not in stage.settings.passes:
            passes.append(skipped_pass(stage, name, facts, untrainable))
            continue
        before = neighbours.now()
        passes.append(run_pass(stage, name, subjects, facts, tick))
        others = max(others, neighbours.other_cores(before, neighbours.now()))
        seen += clocks(stage.device, name)
    tick("count costs", 0.0)
    facts = [_with_overhead(each, subjects, stage) for each in facts]
    return Measured(tuple(facts), tuple(passes), stage.clock.facts, tuple(seen), others)


def problem_facts(path: Path) -> ProblemFacts:
    """The facts of a problem that are known without running it."""
    # Records are shared, so they do not contain the names of this machine's folders.
    whole, here = path.resolve(), Path.cwd()
    shown = whole.relative_to(here) if whole.is_relative_to(here) else Path(path.name)
    return ProblemFacts(path.stem, str(shown), hashlib.sha256(path.read_bytes()).hexdigest())


def _facts(problem: Problem, reference: Reference) -> ProblemFacts:
    assert problem.path is not None
    inputs = (
        f"{name} {str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
        for name, each in named_tensors(reference.feed.masters[0])
    )
    parameters = sum(each.numel() for each in reference.model.parameters())
    return replace(problem_facts(problem.path), inputs=tuple(inputs), parameters=parameters)


def _optimized(problem: Problem, model: nn.Module, feed: Feed, folder: str, tick: Tick) -> Ours:
    """Write the same file as `optimize`, into a temporary folder."""
    tick("optimize", 0.0)
    start = time.perf_counter()
    mode = "train" if model.training else "eval"
    try:
        solution = solve(model, feed.masters[0], name=problem.name, modes=(mode,), build=False)
    except FusewrightError as error:
        return Ours(failure=failure_text(error))
    outcome = Outcome(
        problem=problem.name,
        device=device_name(device_of(model, feed.masters[0])),
        mode=mode,
        plans=solution.prepared.modes,
        output="",
    )
    path = Path(folder) / f"{problem.name}_new.py"
    path.write_text(file_text(solution.bundle, problem.source, header(outcome)))
    return Ours(solution, path, time.perf_counter() - start)


def named_candidates(paths: Sequence[Path]) -> list[Candidate]:
    """The given files under their shortest names that are unique and not taken."""
    levels = [
        [each.stem for each in paths],
        [f"{each.absolute().parent.name}/{each.stem}" for each in paths],
        [str(each) for each in paths],
    ]
    found = []
    for index, path in enumerate(paths):
        names = (names[index] for names in levels if names.count(names[index]) == 1)
        name = next((each for each in names if each not in _TAKEN), None)
        if name is None:
            raise ProblemError(f"{path}: this file is given twice; name each file once")
        found.append(Candidate(name, "foreign", path))
    return found


def _built(
    stage: Stage, ours: Ours, tick: Tick
) -> tuple[dict[str, BenchSubject], list[CandidateFacts]]:
    """Every candidate after its first calls, and their costs; failures with their reason."""
    tick("build", 0.0)
    subjects: dict[str, BenchSubject] = {}
    facts: list[CandidateFacts] = []
    if ours.failure:
        facts.append(CandidateFacts("ours", "ours", note=ours.failure))
    baselines = [Candidate(each, each) for each in stage.settings.baselines]
    emitted = [replace(_OURS, path=ours.path)] if ours.path else []
    made_from = (stage.problem, stage.reference.model, stage.reference.feed)
    for candidate in (*baselines, *emitted):
        tick(f"build {candidate.name}", 0.0)
        named = CandidateFacts(candidate.name, candidate.kind)
        if candidate.kind == "cudagraphs" and stage.device.type != "cuda":
            facts.append(replace(named, note="skipped: needs a GPU"))
            continue
        try:
            subject = make_subject(candidate, *made_from)
            subject.tangents = stage.reference.tangents
            with nullcontext() if candidate.trusted else steady_flags(candidate.name):
                taken = _cold(subject, stage, ours)
        except Exception as error:  # a candidate's failure is its result
            facts.append(replace(named, note=failure_text(error)))
            continue
        subjects[candidate.name] = subject
        facts.append(replace(named, costs=taken))
    if not stage.settings.quick:
        # One reset for all candidates: it discards everything that torch.compile has compiled.
        torch._dynamo.reset()
        for subject in subjects.values():
            if subject.candidate.kind in ("compile", "max-autotune"):
                subject.compile()
        facts = [_warm(each, subjects, stage) for each in facts]
    return subjects, facts


def _cold(subject: BenchSubject, stage: Stage, ours: Ours) -> Costs:
    """Build a candidate. With quick settings the caches may be full, so no seconds are kept."""
    candidate, quick = subject.candidate, stage.settings.quick
    seconds = costs.build_seconds(subject, stage.settings.passes)
    built = candidate.kind != "eager"
    return Costs(
        optimize_seconds=ours.seconds if candidate.kind == "ours" else None,
        cold_build_seconds=seconds if built and not quick else None,
        file_bytes=candidate.path.stat().st_size if candidate.path else None,
    )


def _warm(facts: CandidateFacts, subjects: dict[str, BenchSubject], stage: Stage) -> CandidateFacts:
    """The same build again, with full caches, as in a second process."""
    subject = subjects.get(facts.name)
    if subject is None or facts.kind not in ("compile", "max-autotune", "ours"):
        return facts
    start = time.perf_counter()
    try:
        if subject.candidate.path:
            # A new copy of the file's module must find its kernels again.
            model = load_model(subject.candidate.path, stage.problem, stage.reference.model)
            again = BenchSubject(subject.candidate, model, subject.feed)
            again.tangents = subject.tangents
            costs.build_seconds(again, stage.settings.passes)
        else:
            costs.build_seconds(subject, stage.settings.passes)
    except Exception as error:
        del subjects[facts.name]
        return replace(facts, note=f"fails when built a second time: {failure_text(error)}")
    seconds = time.perf_counter() - start
    return replace(facts, costs=replace(facts.costs, warm_build_seconds=seconds))


def _with_overhead(
    facts: CandidateFacts, subjects: dict[str, BenchSubject], stage: Stage
) -> CandidateFacts:
    subject = subjects.get(facts.name)
    if subject is None or "forward" not in stage.settings.passes:
        return facts
    try:
        found, method = costs.overhead(subject, stage.device)
    except Exception as error:
        return replace(facts, note=facts.note or failure_text(error))
    return replace(facts, costs=replace(facts.costs, overhead_us=found, overhead_method=method))


@contextmanager
def _compiler(reference: Reference) -> Iterator[None]:
    """Make torch.compile draw the same random numbers as eager; discard its code afterwards."""
    import torch._inductor.config as inductor

    try:
        with inductor.patch(fallback_random=reference.random):
            yield
    finally:
        torch._dynamo.reset()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
