"""One problem, all candidates, one process: load, build, check, time, check again, look closer.

`bench` gives a `Record`. Whatever is wrong with the problem or with a given file raises before
anything is timed; whatever goes wrong with one candidate is that candidate's result.
"""

from __future__ import annotations

import datetime
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fusewright.bench import costs, neighbours
from fusewright.bench.clock import Clock, make_clock
from fusewright.bench.environment import clocks, look_around
from fusewright.bench.feeds import Feed
from fusewright.bench.flags import steady_flags
from fusewright.bench.floors import captured, measure_rates
from fusewright.bench.passes import Stage, run_pass
from fusewright.bench.plan_record import plan_graphs
from fusewright.bench.record import (
    BASELINES,
    CandidateFacts,
    Costs,
    ProblemFacts,
    Rates,
    Record,
    Settings,
)
from fusewright.bench.reference import Reference, input_forms
from fusewright.bench.sampling import failure_text
from fusewright.bench.subjects import Candidate, Subject, load_model, make_subject
from fusewright.compile.solution import Solution, device_of, solve
from fusewright.emit.file import file_text
from fusewright.errors import FusewrightError, ProblemError
from fusewright.problem.inputs import resolve_device
from fusewright.problem.load import Problem, load_problem
from fusewright.report import Outcome, header
from fusewright.target.device import device_name

Tick = Callable[[str, float], None]
_TAKEN = (*BASELINES, "ours")


@dataclass(frozen=True)
class Ours:
    """Our own candidate: its emitted file, or the words of what kept us from making it."""

    solution: Solution | None = None
    path: Path | None = None
    seconds: float | None = None
    failure: str = ""


def phases(settings: Settings, *, optimizes: bool) -> tuple[str, ...]:
    """The names that `tick` hears first, in their order."""
    names = ["load", *(["optimize"] if optimizes else []), "measure rates", "build"]
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
    tick: Tick = lambda name, share: None,
) -> Record:
    """Measure a problem; `optimizes` makes our own module first, None where no file is given."""
    start, started_at = time.perf_counter(), _now()
    tick("load", 0.0)
    where = resolve_device(settings.device)
    problem = load_problem(path)
    with (
        torch.random.fork_rng(devices=[where] if where.type == "cuda" else []),
        tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder,
        nullcontext() if settings.quick else costs.empty_caches(),
    ):
        torch.manual_seed(settings.seed)
        model = problem.make_model().to(where).train(settings.mode == "train")
        reference = _reference(problem, model, where, settings)
        # A file that does not fit is found before anything slow begins.
        feed = reference.feed
        foreign = [_foreign(each, problem, model, feed) for each in _named(models_new)]
        wanted = not models_new if optimizes is None else optimizes
        ours = _optimized(problem, model, feed, folder, tick) if wanted else Ours()
        with _compiler(reference):
            record = _measured(problem, reference, foreign, ours, settings, command, tick)
    return replace(record, started_at=started_at, seconds=time.perf_counter() - start)


def _foreign(candidate: Candidate, problem: Problem, model: nn.Module, feed: Feed) -> Subject:
    with steady_flags(str(candidate.path)):
        return make_subject(candidate, problem, model, feed)


def _measured(
    problem: Problem,
    reference: Reference,
    foreign: Sequence[Subject],
    ours: Ours,
    settings: Settings,
    command: str,
    tick: Tick,
) -> Record:
    tick("measure rates", 0.0)
    where = resolve_device(settings.device)
    environment = look_around(where, command)
    clock = make_clock(where)
    rates = measure_rates(where, clock, quick=settings.quick)
    seen = [*clocks(where, "measure rates")]
    stage = _stage(problem, reference, ours, where, clock, rates, settings)
    tick("build", 0.0)
    subjects, facts = _built(stage, foreign, ours, tick)
    passes, others = [], 0.0
    for name in settings.passes:
        before = neighbours.now()
        passes.append(run_pass(stage, name, subjects, facts, tick))
        others = max(others, neighbours.other_cores(before, neighbours.now()))
        seen += clocks(where, name)
    tick("count costs", 0.0)
    facts = [_with_overhead(each, subjects, stage) for each in facts]
    return Record(
        problem=_facts(problem, reference),
        settings=settings,
        environment=replace(environment, clocks=tuple(seen), other_cores=others),
        rates=rates,
        clock=clock.facts,
        candidates=tuple(facts),
        passes=tuple(passes),
        plan=plan_graphs(ours.solution.prepared.modes) if ours.solution else (),
    )


def problem_facts(path: Path) -> ProblemFacts:
    """What can be said of a problem without running it."""
    whole = path.resolve()
    # A record is kept and passed on: how this machine's folders are called is no part of it.
    here = Path.cwd()
    shown = whole.relative_to(here) if whole.is_relative_to(here) else Path(path.name)
    return ProblemFacts(path.stem, str(shown), hashlib.sha256(path.read_bytes()).hexdigest())


def _facts(problem: Problem, reference: Reference) -> ProblemFacts:
    assert problem.path is not None
    return replace(
        problem_facts(problem.path),
        inputs=input_forms(reference.feed),
        parameters=sum(each.numel() for each in reference.model.parameters()),
    )


def _reference(
    problem: Problem, model: nn.Module, where: torch.device, settings: Settings
) -> Reference:
    def made(gradients: bool) -> Reference:
        feed = Feed(
            problem, where, sets=settings.input_sets, seed=settings.seed, gradients=gradients
        )
        return Reference(model, feed, settings.seed)

    try:
        return made(gradients=True)
    except ProblemError as error:
        if "in-place" not in str(error):
            raise
        # A model that writes into its arguments cannot take leaves that require gradients.
        return made(gradients=False)


def _optimized(problem: Problem, model: nn.Module, feed: Feed, folder: str, tick: Tick) -> Ours:
    """Write the file that `optimize` would, into a folder that goes away."""
    tick("optimize", 0.0)
    start = time.perf_counter()
    mode = "train" if model.training else "eval"
    try:
        solution = solve(model, feed.masters[0], name=problem.name, modes=(mode,))
    except FusewrightError as error:
        return Ours(failure=failure_text(error))
    outcome = Outcome(
        problem=problem.name,
        device=device_name(device_of(model, feed.masters[0])),
        mode=mode,
        plans=solution.prepared.modes,
        build_seconds=solution.seconds,
        output="",
    )
    path = Path(folder) / f"{problem.name}_new.py"
    path.write_text(file_text(solution.bundle, problem.source, header(outcome)))
    return Ours(solution, path, time.perf_counter() - start)


def _stage(
    problem: Problem,
    reference: Reference,
    ours: Ours,
    where: torch.device,
    clock: Clock,
    rates: Rates,
    settings: Settings,
) -> Stage:
    try:
        program, note = captured(reference.model, reference.feed.masters[0], settings.mode), ""
    except FusewrightError as error:
        program, note = None, failure_text(error)
    plans = ours.solution.prepared.modes[0] if ours.solution else None
    return Stage(problem, reference, where, clock, rates, settings, program, note, plans)


def _named(paths: Sequence[Path]) -> list[Candidate]:
    """Foreign files under the shortest names that tell them apart, and from our own candidates."""
    levels = [
        [each.stem for each in paths],
        [f"{each.absolute().parent.name}/{each.stem}" for each in paths],
        [str(each) for each in paths],
    ]
    found = []
    for place, path in enumerate(paths):
        names = (names[place] for names in levels if names.count(names[place]) == 1)
        name = next((each for each in names if each not in _TAKEN), None)
        if name is None:
            raise ProblemError(f"{path}: is given twice")
        found.append(Candidate(name, "foreign", path))
    return found


def _built(
    stage: Stage, foreign: Sequence[Subject], ours: Ours, tick: Tick
) -> tuple[dict[str, Subject], list[CandidateFacts]]:
    """Every candidate after its first calls, and what those took; the rest with their reason."""
    subjects: dict[str, Subject] = {}
    facts: list[CandidateFacts] = []
    if ours.failure:
        facts.append(CandidateFacts("ours", "ours", note=ours.failure))
    wanted: list[Subject | Candidate] = [Candidate(each, each) for each in stage.settings.baselines]
    wanted += [Candidate("ours", "ours", ours.path)] if ours.path else []
    for each in (*wanted, *foreign):
        candidate = each.candidate if isinstance(each, Subject) else each
        tick(f"build {candidate.name}", 0.0)
        path = str(candidate.path) if candidate.kind == "foreign" else ""
        named = CandidateFacts(candidate.name, candidate.kind, path)
        if candidate.kind == "cudagraphs" and stage.device.type != "cuda":
            facts.append(replace(named, note="skipped: needs a GPU"))
            continue
        try:
            subject = each if isinstance(each, Subject) else _subject(stage, each)
            subject.tangents = stage.reference.tangents
            with steady_flags(candidate.name, foreign=candidate.kind == "foreign"):
                taken = _cold(subject, stage, ours)
        except Exception as error:  # Somebody's code: its failure is its result.
            facts.append(replace(named, note=failure_text(error)))
            continue
        subjects[candidate.name] = subject
        facts.append(replace(named, costs=taken))
    if not stage.settings.quick:
        facts = [_warm(each, subjects, stage) for each in _after_reset(facts, subjects)]
    return subjects, facts


def _subject(stage: Stage, candidate: Candidate) -> Subject:
    return make_subject(candidate, stage.problem, stage.reference.model, stage.reference.feed)


def _cold(subject: Subject, stage: Stage, ours: Ours) -> Costs:
    """Build it; with quick settings the caches may be full, so the seconds say nothing."""
    candidate, quick = subject.candidate, stage.settings.quick
    seconds = costs.build_seconds(subject, stage.settings.passes)
    built = candidate.kind != "eager"
    return Costs(
        optimize_seconds=ours.seconds if candidate.kind == "ours" else None,
        cold_build_seconds=seconds if built and not quick else None,
        file_bytes=candidate.path.stat().st_size if candidate.path else None,
    )


def _after_reset(
    facts: list[CandidateFacts], subjects: dict[str, Subject]
) -> Iterator[CandidateFacts]:
    """Forget everything compiled, once for all candidates: a reset reaches all of them."""
    torch._dynamo.reset()
    for each in subjects.values():
        if each.candidate.kind in ("compile", "max-autotune"):
            each.compile()
    yield from facts


def _warm(facts: CandidateFacts, subjects: dict[str, Subject], stage: Stage) -> CandidateFacts:
    """The same build again, with full caches, as a second process finds them."""
    subject = subjects.get(facts.name)
    if subject is None or facts.kind not in ("compile", "max-autotune", "ours", "foreign"):
        return facts
    start = time.perf_counter()
    try:
        if subject.candidate.path:
            # Another copy of the file's code, which has to find its kernels again.
            model = load_model(subject.candidate.path, stage.problem, stage.reference.model)
            again = Subject(subject.candidate, model, subject.feed)
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
    facts: CandidateFacts, subjects: dict[str, Subject], stage: Stage
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
    """torch.compile draws eager's random numbers where the model draws any; nothing is kept."""
    import torch._inductor.config as inductor

    try:
        with inductor.patch(fallback_random=reference.random):
            yield
    finally:
        torch._dynamo.reset()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
