"""Checks a candidate's outputs, gradients and buffers against a float64 run of the model.

A problem and a factory of candidates come in; a `Report` goes out. It has the checks of every
scenario in every mode, each on fresh inputs. A call that is too large for a float64 run is checked
in parts, and scenarios beyond the time limit are left out. The notes of the report say so.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.errors import FusewrightError, ProblemError
from fusewright.problem.inputs import resolve_device
from fusewright.problem.load import Problem
from fusewright.verify.budget import (
    Budget,
    budget_of,
    counting_saved_tensors,
    deadline,
    footprint,
    free_memory,
)
from fusewright.verify.case import Case, Findings, answering, labelled
from fusewright.verify.compare import Check, settle
from fusewright.verify.feeds import Feed, Inputs, make_inputs
from fusewright.verify.flags import steady_flags
from fusewright.verify.large import EAGER_FAILS, check_in_parts
from fusewright.verify.others import right_runs
from fusewright.verify.reference import NO_MEMORY, Reference, examine, stir
from fusewright.verify.respondent import Here, Respondent
from fusewright.verify.rows import possible_batches, sample_rows
from fusewright.verify.run import make_model, restore, with_state_of
from fusewright.verify.scenarios import Scenario, asked

# Told which scenario is being checked, and the share of all that is done.
OnProgress = Callable[[str, float], None]
Reduce = Callable[[Inputs], Inputs]

_LOOKS = 3
_NEXT_LOOK = 10_007  # between the seeds of two looks, so that scenarios draw different values
# The time of an essential scenario, even if none is left.
_LEAST_S = 2.0


@dataclass(frozen=True)
class Report:
    """All checks of one candidate, in the order in which they were made.

    `notes` say what was checked in another way than against a float64 run of the whole call, and
    what was not checked.
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)


def verify(
    problem: Problem,
    candidate_factory: Callable[[], nn.Module],
    *,
    device: str | torch.device,
    modes: Sequence[str] = ("train", "eval"),
    seed: int | None = None,
    budget: Budget | None = None,
    progress: OnProgress = lambda words, share: None,
) -> Report:
    """Compare a module of this process with the model in every mode.

    The factory returns a new module, whose parameters and buffers are overwritten. A seed makes the
    run repeatable. By default the checks may take most of the free memory, and as long as they
    need.
    """
    where = resolve_device(device)

    def respondent(model: nn.Module) -> Respondent:
        with steady_flags("the candidate"):
            made = candidate_factory().to(where)
            return Here(with_state_of(model, made, "the candidate"))

    how = (device, modes, seed, budget, progress)
    return verify_respondent(problem, respondent, *how)


def verify_respondent(
    problem: Problem,
    make_respondent: Callable[[nn.Module], Respondent],
    device: str | torch.device,
    modes: Sequence[str] = ("train", "eval"),
    seed: int | None = None,
    budget: Budget | None = None,
    progress: OnProgress = lambda words, share: None,
) -> Report:
    """As `verify`, with anybody who answers questions about a model with these values."""
    where = resolve_device(device)
    seed = secrets.randbits(31) if seed is None else seed
    budget = budget_of(where) if budget is None else budget
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        model = make_model(problem, where, seed)
        torch.manual_seed(seed)
        candidate = make_respondent(model)
        checker = _Checker(problem, model, candidate, where, seed, budget)
        found = list(checker.findings(tuple(asked(modes)), progress))
    notes: dict[str, list[str]] = {}
    for label, each in found:
        for note in each.notes:
            notes.setdefault(note, []).append(label)
    said = tuple(f"{'; '.join(labels)}: {note}" for note, labels in notes.items())
    return Report(tuple(check for _, each in found for check in each.checks), said)


class _Checker:
    """Asks one scenario after the other; the cases of two modes are never in memory together."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        candidate: Respondent,
        device: torch.device,
        seed: int,
        budget: Budget,
    ) -> None:
        self.problem, self.model, self.candidate = problem, model, candidate
        self.device, self.seed, self.budget = device, seed, budget
        self.buffers = {name: each.detach().clone() for name, each in model.named_buffers()}

    def findings(
        self, scenarios: Sequence[Scenario], progress: OnProgress
    ) -> Iterator[tuple[str, Findings]]:
        """What was found, with the scenarios that it is about."""
        ends, left_out = deadline(self.budget), list[str]()
        case, reduce, mode = None, None, ""
        for index, scenario in enumerate(scenarios):
            if case is not None and not _applies(scenario, case.reference):
                continue
            if scenario.name and ends.left_s <= 0:
                left_out.append(scenario.label)
                continue
            progress(scenario.label, index / len(scenarios))
            if case is None or reduce is None or scenario.mode != mode:
                case, reduce, mode = None, None, scenario.mode
                case, reduce, note = self._begun(mode)
                yield mode, Findings(notes=note)
            rest = sum(map(_weight, scenarios[index:]))
            seconds = max(ends.left_s * _weight(scenario) / rest, _LEAST_S)
            draw = partial(self._drawn, reduce, index)
            yield scenario.label, self._checked(case, scenario, draw, seconds)
        if left_out:
            over = f"not checked: the {self.budget.seconds:g} s for checks were over"
            yield "; ".join(left_out), Findings(notes=(over,))

    def _drawn(self, reduce: Reduce, index: int, look: int) -> Inputs:
        torch.manual_seed(self.seed + index + look * _NEXT_LOOK)
        return reduce(make_inputs(self.problem, self.device))

    def _begun(self, mode: str) -> tuple[Case, Reduce, tuple[str, ...]]:
        """The case of a mode, with as many rows as forward has memory for."""
        torch.manual_seed(self.seed)
        values = make_inputs(self.problem, self.device)
        batch, rows = next(possible_batches(values), None), 0
        reduce: Reduce = lambda inputs: inputs  # noqa: E731
        while True:
            try:
                case = self._case(reduce(values), mode)
            except ProblemError as error:
                if batch is None or not is_out_of_memory(error) or rows == 1:
                    raise
            else:
                words = f"forward does not fit into memory; {rows} of the rows were checked"
                return case, reduce, (words,) if rows else ()
            free_memory(self.device)
            rows = (rows or batch.rows) // 2
            reduce = partial(batch.part, index=sample_rows(batch.rows, rows, self.seed))

    def _case(self, values: Inputs, mode: str) -> Case:
        restore(self.model, self.buffers)
        feed = Feed((values,), seed=self.seed)
        feed.release()
        try:
            with counting_saved_tensors() as saved:
                reference = Reference(self.model, feed, self.seed, mode)
            sizes = saved.sizes(self.model.parameters())
        except ProblemError as error:
            if is_out_of_memory(error):
                raise
            # Not every model can be watched.
            reference, sizes = Reference(self.model, feed, self.seed, mode), []
        needed = footprint(self.model, values, reference.tangents, sizes)
        self.candidate.begin(self.model, needed)
        return Case(reference, self.candidate, needed, self.budget, self.device)

    def _checked(
        self,
        case: Case,
        scenario: Scenario,
        draw: Callable[[int], Inputs],
        seconds: float,
    ) -> Findings:
        """The checks of a scenario; if one is doubtful, over several looks with other values.

        They are taken even if the time is over: a slow machine must not make a result wrong.
        """
        if scenario.new_parameters:
            if not stir([case.reference.model], self.seed + 1):
                return Findings()
            self.candidate.take_parameters(case.reference.model)
        if scenario.again and not case.reference.attributes:
            return Findings()
        looks: list[Findings] = []
        for look in range(_LOOKS):
            try:
                found = _look(case, scenario, draw(look), seconds)
            except (FusewrightError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                found = Findings(notes=("not checked: memory ran out",))
            if not found.checks:
                return Findings(notes=found.notes)
            looks.append(found)
            if not any(check.is_doubtful for check in looks[0].checks):
                break
        named = [{check.name: check for check in found.checks} for found in looks]
        names = dict.fromkeys(name for found in named for name in found)
        settled = [settle([found[name] for found in named if name in found]) for name in names]
        missing = case.reference.no_gradients if scenario.gradients else ""
        return Findings(tuple(settled), (*looks[0].notes, *filter(None, [missing])))


def _applies(scenario: Scenario, reference: Reference) -> bool:
    """Whether the model has what a scenario is about."""
    floating = any(each.is_floating_point() for each in reference.model.parameters())
    remembers = bool(reference.attributes)
    return (floating or not scenario.new_parameters) and (remembers or not scenario.again)


def _weight(scenario: Scenario) -> int:
    """The share of the time that a scenario may take: gradients cost more, essentials may more."""
    return (3 if scenario.gradients else 1) * (1 if scenario.name else 2)


def _look(case: Case, scenario: Scenario, values: Inputs, seconds: float) -> Findings:
    """Check a scenario once: as a whole if that is possible, else in parts."""
    why = case.too_large(scenario, seconds)
    if not why:
        found, why = _checked_whole(case, scenario, values)
        if not why:
            return found
        case.failed[scenario.gradients] = why
        free_memory(case.device)
    return check_in_parts(case, scenario, values, why, seconds)


def _checked_whole(case: Case, scenario: Scenario, values: Inputs) -> tuple[Findings, str]:
    """The checks against one float64 run, or why there is none."""
    reference = case.reference
    reference.feed.require_gradients(scenario.gradients and reference.differentiable)
    try:
        expected = reference.expect(scenario, values)
        if expected is None:
            return Findings(), ""
        if NO_MEMORY in expected.why:
            return Findings(), NO_MEMORY
        right = partial(right_runs, reference)
        checks = examine(
            expected, answering(case.candidate, reference.feed, scenario), right_runs=right
        )
    except (FusewrightError, RuntimeError) as error:
        if is_out_of_memory(error):
            return Findings(), NO_MEMORY
        if not isinstance(error, ProblemError) or case.batch is None:
            raise
        words = " ".join(str(error.__cause__ or error).split())
        return Findings(), f"{EAGER_FAILS} ({words})"
    return Findings(labelled(scenario.label, checks)), ""
