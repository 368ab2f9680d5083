"""Checks a candidate's outputs, gradients and buffers against a float64 run of the model.

A problem and a factory of candidates come in; a `Report` goes out. It has the checks of every
scenario in every mode, each on fresh inputs.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fusewright.errors import FusewrightError, VerifyError
from fusewright.problem.inputs import resolve_device
from fusewright.problem.load import Problem
from fusewright.verify.compare import Check, settle
from fusewright.verify.feeds import Feed, make_inputs
from fusewright.verify.flags import steady_flags
from fusewright.verify.reference import Reference, examine, stir
from fusewright.verify.run import Subject, ask, make_model, with_state_of
from fusewright.verify.scenarios import Answer, Question, Scenario, asked

_LOOKS = 3
_NEXT_LOOK = 10_007  # between the seeds of two looks, so that scenarios draw different values


@dataclass(frozen=True)
class Report:
    """All checks of one candidate, in the order in which they were made."""

    checks: tuple[Check, ...]

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
) -> Report:
    """Compare a candidate with the model in every mode; a seed makes the run repeatable.

    The factory returns a new module, whose parameters and buffers are overwritten.
    """
    where = resolve_device(device)
    seed = secrets.randbits(31) if seed is None else seed
    checks: list[Check] = []
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        model = make_model(problem, where, seed)
        torch.manual_seed(seed)
        with steady_flags("the candidate"):
            candidate = with_state_of(model, candidate_factory().to(where), "the candidate")
        torch.manual_seed(seed)
        feed = Feed((make_inputs(problem, where),), seed=seed)
        subject = Subject(candidate, feed)
        references = {mode: Reference(model, feed, seed, mode) for mode in modes}
        for index, scenario in enumerate(asked(modes)):

            def draw(look: int, index: int = index) -> tuple[object, ...]:
                torch.manual_seed(seed + index + look * _NEXT_LOOK)
                return make_inputs(problem, where)

            checks += _checked(references[scenario.mode], subject, scenario, draw)
    return Report(tuple(checks))


def _checked(
    reference: Reference,
    subject: Subject,
    scenario: Scenario,
    draw: Callable[[int], tuple[object, ...]],
) -> list[Check]:
    """The checks of a scenario; if one is doubtful, over several looks with other values."""
    reference.feed.require_gradients(scenario.gradients and reference.differentiable)
    models = [reference.model, subject.model]
    if scenario.new_parameters and not stir(models, reference.seed + 1):
        return []
    looks: list[tuple[Check, ...]] = []
    for look in range(_LOOKS):
        expected = reference.expect(scenario, draw(look))
        if expected is None:
            return []
        looks.append(examine(expected, _answering(subject, scenario)))
        if not any(check.is_doubtful for check in looks[0]):
            break
    named = [{check.name: check for check in found} for found in looks]
    names = dict.fromkeys(name for found in named for name in found)
    settled = [settle([found[name] for found in named if name in found]) for name in names]
    return [dataclasses.replace(each, name=f"{scenario.label}: {each.name}") for each in settled]


def _answering(subject: Subject, scenario: Scenario) -> Callable[[Question, str], Answer]:
    def answer(question: Question, layout: str) -> Answer:
        try:
            with steady_flags("the candidate"):
                return ask(subject, question, (layout,))
        except FusewrightError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise VerifyError(f"the candidate fails in {scenario.label}: {what}") from error

    return answer
