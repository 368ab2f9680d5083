"""A model in one mode beside its candidate: what its checks would take, and what was found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.errors import FusewrightError, ProblemError, VerifyError
from fusewright.verify.budget import Budget, Footprint
from fusewright.verify.compare import Check
from fusewright.verify.feeds import Feed, Inputs
from fusewright.verify.reference import NO_MEMORY, Reference
from fusewright.verify.respondent import Respondent
from fusewright.verify.rows import Batch, are_independent, possible_batches
from fusewright.verify.run import ask
from fusewright.verify.scenarios import PLAIN_LAYOUT, Answer, Question, Scenario
from fusewright.verify.wide import VALUE_LAYOUTS, WideModel

# A float64 run takes at most so many times as long as eager. H200: a convolution in TF32 has
# tensor cores, one in float64 has none.
_SLOWDOWN = {"cuda": 200.0, "cpu": 20.0}
# Most models are far from that.
_USUAL_SHARE = 0.1
_TRIAL_SHARE = 16
# Without gradients, of the time with two backward passes.
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Findings:
    """Checks under their full names, and sentences about how they were made."""

    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()


class Case:
    """What is known about a model in one mode is found out once, when it is first needed."""

    def __init__(
        self,
        reference: Reference,
        candidate: Respondent,
        footprint: Footprint,
        budget: Budget,
        device: torch.device,
    ) -> None:
        self.reference, self.candidate = reference, candidate
        self.footprint, self.budget, self.device = footprint, budget, device
        # Why the whole call failed before, by whether it took gradients.
        self.failed: dict[bool, str] = {}
        # How many rows a part may have, as failures have shown.
        self.most_rows: dict[str, int] = {}
        # Whether the candidate runs the original forward on fewer rows.
        self.falls_back = False

    @cached_property
    def batch(self) -> Batch | None:
        """The rows of the arguments, if the model takes half of them as well."""
        values = self.reference.feed.masters[0]
        for batch in possible_batches(values):
            rows = batch.rows // 2
            while rows:
                try:
                    self.smaller(batch.part(values, slice(0, rows)))
                except (ProblemError, RuntimeError) as error:
                    rows = rows // 2 if is_out_of_memory(error) else 0
                else:
                    return batch
        return None

    def smaller(self, values: Inputs) -> Reference:
        """The same model on other values."""
        feed = Feed((values,), seed=self.reference.seed, gradients=self.reference.differentiable)
        feed.release()
        return Reference(self.reference.model, feed, self.reference.seed, self.reference.mode)

    @cached_property
    def independent(self) -> bool:
        """Whether no row of the results depends on another row of the inputs."""
        question = self._question()
        if self.batch is None or self.reference.random or question is None:
            return False
        try:
            return are_independent(self._wide(), question, self.batch)
        except (RuntimeError, TypeError):
            return False  # the model has no float64 run

    def too_large(self, scenario: Scenario, seconds: float) -> str:
        """Why a float64 run of the whole call will not do; empty if it will."""
        if scenario.gradients in self.failed:
            return self.failed[scenario.gradients]
        if self.footprint.float64_bytes(scenario) > self.budget.memory_bytes:
            return NO_MEMORY
        if seconds == math.inf or self.rough_s(scenario) <= seconds:
            return ""
        if self.batch is None:  # no smaller run can be timed
            usual = self.rough_s(scenario) * _USUAL_SHARE
            return "" if usual <= seconds else f"a float64 run may take {usual:.0f} s"
        expected = self.seconds_per_row(scenario) * self.batch.rows
        return f"a float64 run would take about {expected:.0f} s" if expected > seconds else ""

    def rough_s(self, scenario: Scenario) -> float:
        """The most that a float64 run can take."""
        share = 1.0 if scenario.gradients else _FORWARD_SHARE
        return self._eager_s * _SLOWDOWN[self.device.type] * share

    def seconds_per_row(self, scenario: Scenario) -> float:
        """What a float64 run of a part takes for each row; 0 if it has none."""
        return self._row_s * (1.0 if scenario.gradients else _FORWARD_SHARE)

    @cached_property
    def _eager_s(self) -> float:
        question, eager = self._question(), self.reference.eager
        if question is None:
            return 0.0
        try:
            times = [self._timed(lambda: ask(eager, question, PLAIN_LAYOUT)) for _ in range(2)]
        except RuntimeError:
            return 0.0  # the check itself will show why
        return min(times)

    @cached_property
    def _row_s(self) -> float:
        question, batch = self._question(), self.batch
        if batch is None or question is None or self.reference.random:
            return 0.0
        rows = max(batch.rows // _TRIAL_SHARE, min(batch.rows, 2))
        wide, part = self._wide(), batch.question(question, slice(0, rows))
        try:
            # The first run also loads libraries.
            return min(self._timed(lambda: wide.ask(part, VALUE_LAYOUTS)) for _ in range(2)) / rows
        except (RuntimeError, TypeError):
            return 0.0

    def _question(self) -> Question | None:
        scenario = Scenario(gradients=True, mode=self.reference.mode)
        return self.reference.question(scenario, self.reference.feed.masters[0])

    def _wide(self) -> WideModel:
        return WideModel(self.reference.model, self.reference.feed.gradients)

    def _timed(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def answering(
    candidate: Respondent, feed: Feed, scenario: Scenario
) -> Callable[[Question, str], Answer]:
    """Asks a candidate; its failure is a VerifyError."""

    def answer(question: Question, layout: str) -> Answer:
        try:
            return candidate.ask(question, layout, feed)
        except FusewrightError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise VerifyError(f"the candidate fails in {scenario.label}: {what}") from error

    return answer


def labelled(label: str, checks: tuple[Check, ...]) -> tuple[Check, ...]:
    return tuple(replace(each, name=f"{label}: {each.name}") for each in checks)


def layouts_of(reference: Reference, scenario: Scenario) -> tuple[str, ...]:
    """The gradient layouts that are asked for; one if there are no gradients."""
    asks = scenario.gradients and bool(reference.tangents)
    return scenario.layouts if asks else PLAIN_LAYOUT
