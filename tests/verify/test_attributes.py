"""Models that keep a state: it is restored for each question, compared, and carried to a second
call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.problem.load import Arguments, Problem
from fusewright.verify.attributes import (
    Missing,
    changed_attributes,
    kept_attributes,
    restore_attributes,
)
from fusewright.verify.feeds import Feed
from fusewright.verify.reference import Reference
from fusewright.verify.verify import Report, verify
from tests.support.stateful_models import BATCH, STATEFUL, WIDTH, Cell, MadeOnDemand, Notes


def problem_of(model: type[nn.Module]) -> Problem:
    return Problem(
        name=model.__name__,
        path=None,
        source="",
        make_model=model,
        make_inputs=lambda: (torch.randn(BATCH, WIDTH),),
        make_init=Arguments,
    )


def check(model: type[nn.Module], candidate: Callable[[], nn.Module]) -> Report:
    return verify(problem_of(model), candidate, device="cpu", modes=("train", "eval"))


def failed(report: Report) -> set[str]:
    return {each.name for each in report.checks if not each.ok}


@pytest.mark.parametrize("kind", STATEFUL, ids=lambda kind: kind.__name__)
def test_a_model_with_a_state_passes_against_itself(kind: type[nn.Module]) -> None:
    report = check(kind, kind)
    assert report.ok, failed(report)
    names = [each.name for each in report.checks]
    if kind.__name__ != "CountsTraining":
        assert any("second call: output" in name for name in names)
    assert any("attribute" in name for name in names)


def test_the_state_is_compared_and_has_a_float64_run() -> None:
    report = check(Cell, Cell)
    checks = {each.name: each for each in report.checks}
    assert checks["eval, no_grad: attribute hidden"].float64
    assert "eval, second call: grad inner.weight" in checks


class Forgets(Cell):
    """Right at the first call, and its state never changes."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(torch.tanh(self.inner(torch.cat([x, self.hidden], 1))))
        return y


def test_a_candidate_that_forgets_its_state_is_wrong() -> None:
    wrong = failed(check(Cell, Forgets))
    assert {"train: attribute hidden", "eval, no_grad, second call: output"} <= wrong
    assert "train: output" not in wrong


class CachesItsFirst(MadeOnDemand):
    """What a candidate keeps under other names is not restored, so an old result shows."""

    first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.first is None:
            self.first = y.detach()
        return y if y.requires_grad else self.first


def test_what_else_a_candidate_keeps_stays() -> None:
    wrong = failed(check(MadeOnDemand, CachesItsFirst))
    assert {"train, no_grad: output", "eval, no_grad: output"} <= wrong


def test_attributes_are_found_and_restored() -> None:
    model = Notes()
    before = kept_attributes(model)
    model(torch.randn(BATCH, WIDTH))
    changed = changed_attributes(model, before)
    names = ("calls", "samples", "attention", "history", "last", "features", "shape")
    assert {*changed} == {*names} - {"last"} and changed["shape"] is Missing
    restore_attributes(model, changed)
    assert model.calls == 0 and model.history == [] and model.features == {}
    assert model.attention is None and not hasattr(model, "shape")
    assert not any(name == "history" for name in changed_attributes(model, before))


class Undifferentiable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.layer(x))
        y += x
        return y


class _TrainingOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        ctx.training = training
        return x * 2

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        if not ctx.training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        return tangents[0] * 2, None


class Recurrent(nn.Module):
    """As cuDNN's recurrent layers: in evaluation mode there is no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _TrainingOnly.apply(x * self.scale, self.training)
        return result


def test_a_model_without_gradients_in_one_mode_is_compared_without_them_there() -> None:
    report = check(Recurrent, Recurrent)
    assert report.ok
    names = {each.name for each in report.checks}
    assert "train: grad scale" in names and "eval, no_grad: output" in names
    assert "eval: grad scale" not in names
    (note,) = [each for each in report.notes if "no gradients: PyTorch itself" in each]
    assert note.startswith("eval") and "only be called in training mode" in note


def test_a_model_that_pytorch_cannot_differentiate_is_compared_without_gradients() -> None:
    report = check(Undifferentiable, Undifferentiable)
    assert report.ok and not any("grad " in each.name for each in report.checks)
    (note,) = report.notes
    assert note.startswith("train; eval; eval, new parameters: no gradients: PyTorch itself cannot")


class Off(Undifferentiable):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.01 if torch.is_grad_enabled() else 1)


def test_its_outputs_are_compared_with_gradients_on() -> None:
    assert failed(check(Undifferentiable, Off)) >= {"train: output", "eval: output"}


def reference_of(kind: type[nn.Module]) -> Reference:
    return Reference(kind(), Feed(((torch.randn(BATCH, WIDTH),),), seed=0), 0, "train")


def test_who_cannot_be_trained_step_by_step() -> None:
    assert "modified by an inplace operation" in reference_of(Undifferentiable).untrainable()
    assert "no second step" in reference_of(Cell).untrainable()
    reference = reference_of(MadeOnDemand)
    assert "no second step" in reference.untrainable()
    assert reference.model.hidden is None
    assert reference_of(Notes).untrainable() == ""
