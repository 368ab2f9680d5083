"""One problem, all candidates, one process: load, build, check, time, check again, profile.

`bench` returns a `Record`. An error in the problem or in a given file raises before anything is
timed. A failure of one candidate becomes that candidate's result.
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
from fusewright.bench.passes import Stage, run_pass, skipped_pass
from fusewright.bench.plan_record import plan_graphs
from fusewright.bench.record import BASELINES, CandidateFacts, Costs, ProblemFacts, Record, Settings
from fusewright.bench.sampling import Tick, failure_text
from fusewright.bench.subjects import BenchSubject, Candidate, load_model, make_subject
from fusewright.capture import capture
from fusewright.compile.solution import Solution, device_of, solve
from fusewright.emit.file import file_text
from fusewright.errors import FusewrightError, ProblemError
from fusewright.problem.inputs import named_tensors, resolve_device
from fusewright.problem.load import Problem, load_problem
from fusewright.report import Outcome, header
from fusewright.target.device import device_name
from fusewright.tune import neighbours
from fusewright.verify.feeds import Feed, make_feed
from fusewright.verify.flags import steady_flags
from fusewright.verify.reference import Reference
from fusewright.verify.run import make_model

_TAKEN = (*BASELINES, "ours")


@dataclass(frozen=True)
class Ours:
    """Our own candidate: its emitted file, or the error that prevented it."""

    solution: Solution | None = None
    path: Path | None = None
    seconds: float | None = None
    failure: str = ""


def phases(settings: Settings, *, optimizes: bool) -> tuple[str, ...]:
    """The names of the steps that are passed to `tick`, in order."""
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
    """Measure a problem. `optimizes` adds our own module; by default only if no file is given."""
    start, started_at = time.perf_counter(), _now()
    tick("load", 0.0)
    where = resolve_device(settings.device)
    problem = load_problem(path)
    with (
        torch.random.fork_rng(devices=[where] if where.type == "cuda" else []),
        tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder,
        nullcontext() if settings.quick else costs.empty_caches(),
    ):
        model = make_model(problem, where, settings.seed).train(settings.mode == "train")
        feed = make_feed(problem, where, sets=settings.input_sets, seed=settings.seed)
        reference = Reference(model, feed, settings.seed, settings.mode)
        # A file that does not fit raises before anything slow begins.
        foreign = [_foreign(each, problem, model, feed) for each in named_candidates(models_new)]
        wanted = not models_new if optimizes is None else optimizes
        ours = _optimized(problem, model, feed, folder, tick) if wanted else Ours()
        with _compiler(reference):
            record = _measured(problem, reference, foreign, ours, settings, command, tick)
    return replace(record, started_at=started_at, seconds=time.perf_counter() - start)


def _foreign(candidate: Candidate, problem: Problem, model: nn.Module, feed: Feed) -> BenchSubject:
    with steady_flags(str(candidate.path)):
        return make_subject(candidate, problem, model, feed)


def _measured(
    problem: Problem,
    reference: Reference,
    foreign: Sequence[BenchSubject],
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
    try:
        program, note = capture(reference.model, reference.feed.masters[0], mode=settings.mode), ""
    except FusewrightError as error:
        program, note = None, failure_text(error)
    plans = ours.solution.prepared.modes[0] if ours.solution else None
    untrainable = reference.untrainable() if "train" in settings.passes else ""
    possible = tuple(each for each in settings.passes if each != "train" or not untrainable)
    timed = replace(settings, passes=possible)
    stage = Stage(problem, reference, where, clock, rates, timed, program, note, plans)
    subjects, facts = _built(stage, foreign, ours, tick)
    passes, others = [], 0.0
    for name in settings.passes:
        if name not in possible:
            passes.append(skipped_pass(stage, name, facts, untrainable))
            continue
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
    stage: Stage, foreign: Sequence[BenchSubject], ours: Ours, tick: Tick
) -> tuple[dict[str, BenchSubject], list[CandidateFacts]]:
    """Every candidate after its first calls, and their costs; failures with their reason."""
    tick("build", 0.0)
    subjects: dict[str, BenchSubject] = {}
    facts: list[CandidateFacts] = []
    if ours.failure:
        facts.append(CandidateFacts("ours", "ours", note=ours.failure))
    baselines = [Candidate(each, each) for each in stage.settings.baselines]
    emitted = [Candidate("ours", "ours", ours.path)] if ours.path else []
    wanted: tuple[BenchSubject | Candidate, ...] = (*baselines, *emitted, *foreign)
    made_from = (stage.problem, stage.reference.model, stage.reference.feed)
    for each in wanted:
        candidate = each.candidate if isinstance(each, BenchSubject) else each
        tick(f"build {candidate.name}", 0.0)
        path = str(candidate.path) if candidate.kind == "foreign" else ""
        named = CandidateFacts(candidate.name, candidate.kind, path)
        if candidate.kind == "cudagraphs" and stage.device.type != "cuda":
            facts.append(replace(named, note="skipped: needs a GPU"))
            continue
        try:
            subject = each if isinstance(each, BenchSubject) else make_subject(each, *made_from)
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
    if subject is None or facts.kind not in ("compile", "max-autotune", "ours", "foreign"):
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
