"""The expected answers: those of the eager model, and those of its float64 run.

`Reference` asks the eager model in one mode and returns `Expected`. `examine` asks a candidate,
which may run in another process, and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.errors import ProblemError
from fusewright.problem.inputs import is_floating, memory_blocks, named_tensors
from fusewright.problem.nested import map_leaves
from fusewright.verify.attributes import (
    changed_attributes,
    kept_attributes,
    restore_attributes,
)
from fusewright.verify.budget import affordable_blocks
from fusewright.verify.compare import Check, compare_answers
from fusewright.verify.feeds import Feed, Inputs, form
from fusewright.verify.figures import root_mean_square
from fusewright.verify.precision import DIGITS, strict_matmuls
from fusewright.verify.run import Subject, ask, restore
from fusewright.verify.scenarios import PLAIN_LAYOUT, Answer, Expected, Question, Results, Scenario
from fusewright.verify.wide import WideModel, value_layout

NO_MEMORY = "a float64 run does not fit into memory"
_STIR, _FROM_ZERO = 0.5, 0.1
# What PyTorch says of a gradient that it cannot compute.
_UNDIFFERENTIABLE = (
    "modified by an inplace operation",
    "derivative for",
    "can only be called in training mode",  # cuDNN's recurrent layers
)
_STALE = "Trying to backward through the graph a second time"
_RIGHT_RUNS = 4  # each in another layout, and with other last digits
_BESIDE = ("grad ", "buffer ", "input ", "attribute ")


class Reference:
    """The model in one mode; `seed` decides tangents and random numbers.

    `random` says whether a training step draws random numbers, `differentiable` whether the
    model accepts inputs that require gradients. `no_gradients` says why there are none, if PyTorch
    itself cannot compute them; then questions ask for none. `attributes` are those that calls
    change, with their values before.
    """

    def __init__(self, model: nn.Module, feed: Feed, seed: int, mode: str) -> None:
        self.model, self.feed, self.seed, self.mode = model, feed, seed, mode
        self.eager, self._asked = Subject(model, feed), 0
        self.no_gradients, self._tried = "", False
        feed.require_gradients(True)
        self.buffers = {name: each.detach().clone() for name, each in model.named_buffers()}
        self._begin(feed.values(0), 0)

    def _begin(self, inputs: Inputs, slot: int) -> None:
        """One run for the outputs; then gradients of their shapes are drawn."""
        scenario = Scenario(gradients=True, mode=self.mode)
        first = Question(scenario, self.seed, inputs, self.buffers, {})
        before = kept_attributes(self.model)
        try:
            answer = self._taking_gradients(first, slot)
        except Exception as error:
            raise broken(scenario, error) from error
        restore(self.model, self.buffers)
        self.random, self.differentiable = answer.random, self.feed.gradients
        self.attributes = changed_attributes(self.model, before)
        restore_attributes(self.model, self.attributes)
        self._form = form(inputs)
        # Around one, not zero: a sum that cancels almost completely has no digits to compare.
        self.tangents = {
            name: torch.randn_like(each, memory_format=torch.contiguous_format) + 1
            for name, each in answer.results[PLAIN_LAYOUT[0]].items()
            if name in answer.differentiable and isinstance(each, Tensor)
        }
        self.eager.tangents = self.tangents

    def _taking_gradients(self, question: Question, slot: int) -> Answer:
        try:
            return ask(self.eager, question, PLAIN_LAYOUT, slot=slot)
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            # A model that writes into its arguments cannot accept leaves that require gradients.
            self.feed.require_gradients(False)
            return ask(self.eager, question, PLAIN_LAYOUT, slot=slot)

    def expect(
        self, scenario: Scenario, values: Inputs, *, slot: int = 0, classes: bool = False
    ) -> Expected | None:
        """The answers to a scenario on these values; `classes` adds those of each precision class.

        None if the scenario does not apply: nothing to alter, or the model refuses it.
        """
        question = self.question(scenario, values, slot)
        if question is None:
            return None
        asks = scenario.gradients and bool(self.tangents)
        layouts = scenario.layouts if asks else PLAIN_LAYOUT
        try:
            eager = ask(self.eager, question, layouts, slot=slot)
        except Exception as error:
            if scenario.alter and isinstance(error, RuntimeError | ValueError):
                return None  # the model refuses NaN, so there is no answer to compare with
            raise broken(scenario, error) from error
        blocks = affordable_blocks(memory_blocks(eager.results[layouts[0]].values()))
        expected = Expected(replace(question, blocks=blocks), eager.results, {})
        if classes:
            with strict_matmuls() as stricter:
                strict = ask(self.eager, question, layouts, slot=slot) if stricter else eager
            expected = replace(expected, strict=strict.results)
        why = "random model: compared with eager under the same seed" if eager.random else ""
        return scaled(replace(expected, why=why) if why else self._with_truth(expected, classes))

    def question(self, scenario: Scenario, values: Inputs, slot: int = 0) -> Question | None:
        """The question of a scenario on these values; None if there is nothing to alter."""
        if scenario.alter:
            if not any(is_floating(each) for _, each in named_tensors(values)):
                return None
            try:
                values = tuple(map_leaves(scenario.alter, each) for each in values)
            except RuntimeError as error:
                raise broken(scenario, error) from error
        if form(values) != self._form:
            self._begin(values, slot)
        if scenario.again and not self.attributes:
            return None
        if scenario.gradients:
            self.try_gradients(values, slot)
        # Random numbers differ from question to question: those kept from an earlier one are wrong.
        self._asked += 1
        return self._asking(scenario, self.seed + self._asked, values)

    def _asking(self, scenario: Scenario, seed: int, values: Inputs) -> Question:
        held = (self.buffers, self.tangents)
        return Question(scenario, seed, values, *held, attributes=self.attributes)

    def try_gradients(self, values: Inputs, slot: int = 0) -> None:
        """Find out, once, whether PyTorch can differentiate the model at all."""
        if self._tried or not self.tangents:
            return
        self._tried = True
        scenario = Scenario(gradients=True, mode=self.mode)
        question = self._asking(scenario, self.seed, values)
        try:
            ask(self.eager, question, PLAIN_LAYOUT, slot=slot)
        except RuntimeError as error:  # another failure will be met again where it is handled
            words = str(error).split(":")[0].split(";")[0]
            if any(each in words for each in _UNDIFFERENTIABLE):
                self.tangents = self.eager.tangents = {}
                self.no_gradients = f"no gradients: PyTorch itself cannot compute them ({words})"

    def untrainable(self) -> str:
        """Why training steps cannot be timed: PyTorch has no gradients, or only for one step."""
        self.try_gradients(self.feed.values(0))
        if self.no_gradients or not self.tangents:
            return self.no_gradients
        self.model.train(self.mode == "train")
        try:
            for _ in range(2):
                self.eager.call(True, 0)
        except RuntimeError as error:
            if _STALE in str(error):
                return f"no second step: the model keeps the graph of the first ({_STALE})"
        finally:
            restore(self.model, self.buffers)
            restore_attributes(self.model, self.attributes)
        return ""

    def _with_truth(self, expected: Expected, classes: bool) -> Expected:
        """Adds the float64 run, or the reason why there is none."""
        layouts, question = tuple(expected.eager), expected.question
        kinds = DIGITS if classes else {}
        try:
            truth = self._wide(question, layouts, None)
            narrow = {kind: self._wide(question, layouts, each) for kind, each in kinds.items()}
        except (RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                return replace(expected, why=f"compared with eager: {NO_MEMORY}")
            words = (str(error) or type(error).__name__).splitlines()[0]
            return replace(expected, why=f"compared with eager: no float64 run ({words})")
        return replace(expected, truth=truth, narrow=narrow)

    def _wide(
        self, question: Question, layouts: Sequence[str], digits: int | None
    ) -> dict[str, Results]:
        return WideModel(self.model, self.feed.gradients, digits=digits).ask(question, layouts)


def examine(
    expected: Expected,
    answer: Callable[[Question, str], Answer],
    layouts: Sequence[str] | None = None,
    right_runs: Callable[[Question, str], Sequence[Results]] | None = None,
) -> tuple[Check, ...]:
    """Ask a candidate once for every layout; the worst check of each result counts.

    Where a result is too far off, `right_runs` may show that right runs are as far off. A few are
    asked one after the other: the gradient of a bias with four elements is off by ten times the
    usual error in one run of fifty, eager's and ours alike.
    """
    worst: dict[str, Check] = {}
    for layout in expected.eager if layouts is None else layouts:
        found = answer(expected.question, layout).results[layout]
        keep_worst(worst, _compared(found, layout, expected, right_runs))
    return tuple(worst.values())


def _compared(
    found: Results,
    layout: str,
    expected: Expected,
    right_runs: Callable[[Question, str], Sequence[Results]] | None,
) -> tuple[Check, ...]:
    """The checks of one layout, beside as many right runs as it takes."""
    checks = tuple(compare_answers(found, layout, expected))
    if right_runs is None or not expected.truth:
        return checks
    alike = (each for each in expected.eager if value_layout(each) == value_layout(layout))
    others = [expected.eager[each] for each in alike if each != layout]
    for number in range(_RIGHT_RUNS):
        if not any(each.is_only_inexact for each in checks):
            break
        asked = replace(expected.question, seed=expected.question.seed + number)
        others += right_runs(asked, layout)
        beside = replace(expected, others={layout: others})
        checks = tuple(compare_answers(found, layout, beside))
    return checks


def keep_worst(worst: dict[str, Check], checks: Iterable[Check]) -> None:
    """Keep the worst check of each name."""
    for check in checks:
        if check.name not in worst or check.badness > worst[check.name].badness:
            worst[check.name] = check


def stir(models: Sequence[nn.Module], seed: int) -> bool:
    """Change the parameters of all models in place, equally; False if there are none."""
    generator = torch.Generator().manual_seed(seed)
    stirred = False
    for name, first in models[0].named_parameters():
        if not first.is_floating_point():
            continue
        # At least a quarter off: farther than any precision. What is all zero gets values.
        factor = 1.0 - _STIR * (1.0 + float(torch.rand((), generator=generator))) / 2
        added = torch.zeros(())
        if not bool(first.any()):
            added = _FROM_ZERO * torch.randn(first.shape, generator=generator)
        stirred = True
        for model in models:
            data = model.get_parameter(name).data
            data.mul_(factor).add_(added.to(data))
    return stirred


def scaled(expected: Expected) -> Expected:
    """Adds the sizes of the largest result and the largest gradient, the scale of noise."""
    found = (expected.truth or expected.eager).values()
    named: list[tuple[str, object]] = [pair for each in found for pair in each.items()]
    named += named_tensors(expected.question.inputs)
    gradients = [each for name, each in named if name.startswith("grad ")]
    others = [each for name, each in named if not name.startswith(_BESIDE)]
    return replace(
        expected,
        usual_rms=max(map(root_mean_square, others), default=0.0),
        usual_gradient_rms=max(map(root_mean_square, gradients), default=0.0),
    )


def broken(scenario: Scenario, error: Exception) -> ProblemError:
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ProblemError(f"the model itself fails in {scenario.label}: {what}; fix it first")
