"""Checks of a call that is too large for one float64 run.

A call with fewer rows is checked against float64. The whole call is compared with eager, element by
element. If rows do not depend on each other, the float64 run of the whole call goes slice by slice,
as far as the time allows. The notes say how far that was.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.errors import FusewrightError, ProblemError
from fusewright.problem.inputs import memory_blocks
from fusewright.verify.budget import (
    Deadline,
    affordable_blocks,
    free_memory,
    room_for_rows,
)
from fusewright.verify.case import Case, Findings, answering, labelled, layouts_of
from fusewright.verify.compare import Check, compare_answers
from fusewright.verify.feeds import Inputs
from fusewright.verify.others import eager_runs, right_runs
from fusewright.verify.reference import NO_MEMORY, broken, examine, keep_worst, scaled
from fusewright.verify.rows import sample_rows
from fusewright.verify.run import ask
from fusewright.verify.scenarios import PLAIN_LAYOUT, Expected, Question, Results, Scenario, Usual
from fusewright.verify.slices import WholeRun, float64_checks

EAGER_FAILS = "eager PyTorch fails on the whole call"
_FALLBACK = "the original forward runs"
_RANDOM = "random model: compared with eager under the same seed"


@dataclass(frozen=True)
class Sample:
    """The checks of a call with some of the rows, and a sentence about them.

    `usual` has the errors by layout and name.
    """

    rows: int = 0
    checks: tuple[Check, ...] = ()
    words: str = ""
    usual: Mapping[str, Mapping[str, Usual]] = field(default_factory=dict)


def check_in_parts(
    case: Case, scenario: Scenario, values: Inputs, why: str, seconds: float
) -> Findings:
    """The checks of a scenario; `why` says why there is no float64 run of the whole call."""
    ends = Deadline(time.monotonic() + seconds)
    sample = _sampled(case, scenario, values, seconds / 2)
    hopeless = why.startswith(EAGER_FAILS) and bool(sample.checks)
    whole = Findings()
    if not hopeless:
        whole = _compared_with_eager(case, scenario, values, sample, why, ends)
    if not sample.checks and not whole.checks:
        return Findings()
    label = scenario.label
    smaller = f"{label}, {sample.rows} of {case.batch.rows} rows" if case.batch else label
    checks = (*labelled(label, whole.checks), *labelled(smaller, sample.checks))
    said = filter(None, (why, sample.words, *whole.notes))
    return Findings(checks, ("; ".join(said),))


def _sampled(case: Case, scenario: Scenario, values: Inputs, seconds: float) -> Sample:
    """Checks a call with as many rows as memory and time allow; fewer, if that fails."""
    batch, problem = case.batch, ""
    if batch is None:
        return Sample(words="no call with fewer rows is possible")
    kind = "sample with gradients" if scenario.gradients else "sample"
    rows = min(_affordable_rows(case, scenario, seconds), case.most_rows.get(kind, batch.rows))
    while rows:
        try:
            part = batch.part(values, sample_rows(batch.rows, rows, case.reference.seed))
            return _checked_part(case, scenario, part, rows)
        except (FusewrightError, RuntimeError) as error:
            problem = _first_line(error)
            if not is_out_of_memory(error) and not isinstance(error, ProblemError):
                if error.__cause__ is None:
                    raise
                return Sample(words=f"no call with fewer rows was checked: {problem}")
        free_memory(case.device)
        rows //= 2
        case.most_rows[kind] = rows
    return Sample(words=f"no call with fewer rows was checked: {problem}")


def _affordable_rows(case: Case, scenario: Scenario, seconds: float) -> int:
    """Halves of the rows, as long as a check of them takes too much memory or time."""
    batch, memory = case.batch, case.budget.memory_bytes
    assert batch is not None
    rows, whole = batch.rows // 2, case.footprint
    fixed = whole.part(0.0).float64_bytes(scenario)
    # The whole inputs stay twice in memory, and the incoming gradient once.
    room = room_for_rows(memory, fixed + 2 * whole.inputs + whole.outputs)
    per_row = 2 * case.seconds_per_row(scenario) if seconds < math.inf else 0.0
    while rows > 1 and (
        whole.part(rows / batch.rows).float64_bytes(scenario) - fixed > room
        or rows * per_row > seconds
    ):
        rows //= 2
    return rows


def _checked_part(case: Case, scenario: Scenario, values: Inputs, rows: int) -> Sample:
    reference = case.smaller(values)
    reference.feed.require_gradients(scenario.gradients and reference.differentiable)
    expected = reference.expect(scenario, values)
    if expected is None:
        return Sample()
    if NO_MEMORY in expected.why:
        raise ProblemError(NO_MEMORY)
    worst, usual = dict[str, Check](), dict[str, Mapping[str, Usual]]()
    answer = answering(case.candidate, reference.feed, scenario)
    right = partial(right_runs, reference)
    with _fallback_noticed(case):
        for layout in expected.eager:
            checks = examine(expected, answer, (layout,), right)
            usual[layout] = {each.name: each.usual for each in checks if _is_measure(each)}
            keep_worst(worst, checks)
    if case.falls_back:
        return Sample(words=f"with {rows} rows the candidate runs the original forward")
    how = "float64" if expected.truth else "eager PyTorch"
    total = case.batch.rows if case.batch else rows
    words = f"a call with {rows} of {total} rows was checked against {how}"
    return Sample(rows, tuple(worst.values()), words, usual)


def _is_measure(check: Check) -> bool:
    """Whether a check says what errors are usual: not if all elements are zero or NaN."""
    return check.ok and check.float64 and check.largest_allowed > 0


@contextmanager
def _fallback_noticed(case: Case) -> Iterator[None]:
    """Notes it in the case if a candidate says that its kernels are not made for a smaller call."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    for each in seen:
        if _FALLBACK in str(each.message):
            case.falls_back = True
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _compared_with_eager(
    case: Case, scenario: Scenario, values: Inputs, sample: Sample, why: str, ends: Deadline
) -> Findings:
    """Every element of the whole call, one layout after the other; float64 where it is possible."""
    reference, worst, words = case.reference, dict[str, Check](), dict[str, None]()
    reference.feed.require_gradients(scenario.gradients and reference.differentiable)
    scale = (0.0, 0.0)
    try:
        question = reference.question(scenario, values)
        for layout in layouts_of(reference, scenario) if question else ():
            assert question is not None
            if worst and ends.left_s <= 0:
                words["time was over for gradients in other layouts"] = None
                break
            found, scale = _layout_checks(case, question, layout, sample, why, scale, ends)
            keep_worst(worst, found.checks)
            words.update(dict.fromkeys(found.notes))
    except (FusewrightError, RuntimeError) as error:
        if not is_out_of_memory(error) and not (sample.checks and isinstance(error, ProblemError)):
            raise
        words[f"not all of the whole call was compared: {_first_line(error)}"] = None
    return Findings(tuple(worst.values()), tuple(words))


def _layout_checks(
    case: Case,
    question: Question,
    layout: str,
    sample: Sample,
    why: str,
    scale: tuple[float, float],
    ends: Deadline,
) -> tuple[Findings, tuple[float, float]]:
    """The checks of one layout, and the sizes of its results or of those before.

    In one layout all gradients may be zero but for rounding: the others give their scale.
    """
    expected = _from_eager(case, question, layout, sample, why)
    if expected is None:
        return Findings(), scale
    scale = (max(scale[0], expected.usual_rms), max(scale[1], expected.usual_gradient_rms))
    expected = replace(expected, usual_rms=scale[0], usual_gradient_rms=scale[1])
    answer = answering(case.candidate, case.reference.feed, question.scenario)
    found = answer(expected.question, layout).results[layout]
    checks = tuple(compare_answers(found, layout, expected))
    alike = expected.why == _RANDOM
    if not alike and any(each.is_only_inexact for each in checks):
        others = {layout: eager_runs(case.reference, question, layout)}
        checks = tuple(compare_answers(found, layout, replace(expected, others=others)))
    words = "every element of the whole call was compared with eager PyTorch"
    if alike or layout not in PLAIN_LAYOUT or question.scenario.alter:
        return Findings(checks, (words,)), scale
    run = WholeRun(expected, found, layout, {each.name: each for each in checks})
    rows = float64_checks(case, run, ends)
    return Findings(rows.checks, (words, *rows.notes)), scale


def _from_eager(
    case: Case, question: Question, layout: str, sample: Sample, why: str
) -> Expected | None:
    """Eager's answer to the whole call, as that to compare with."""
    scenario = question.scenario
    try:
        answer = ask(case.reference.eager, question, (layout,))
    except Exception as error:
        refuses = scenario.alter and isinstance(error, RuntimeError | ValueError)
        if refuses and not is_out_of_memory(error):
            return None  # the model refuses NaN, so there is no answer to compare with
        raise broken(scenario, error) from error
    results: Results = answer.results[layout]
    blocks = affordable_blocks(memory_blocks(results.values()))
    why = _RANDOM if answer.random else f"compared with eager: {why}"
    asked = replace(question, blocks=blocks)
    usual = sample.usual.get(layout, {})
    return scaled(Expected(asked, {layout: results}, {}, usual=usual, why=why))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
