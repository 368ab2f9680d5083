"""Calls that are too large for a float64 run: right candidates pass, wrong ones do not."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.errors import ProblemError, VerifyError
from fusewright.verify import case as cases
from fusewright.verify import verify as checker
from fusewright.verify.budget import Budget
from fusewright.verify.verify import Report, verify
from tests.support.verified import (
    ROWS,
    WRONG,
    ByRow,
    Together,
    backwards,
    candidate,
    problem_of,
)

# A float64 run of the whole call takes 280 kB, the whole call itself 100 kB.
SMALL = Budget(memory_bytes=200_000)
PARTS = "a float64 run does not fit into memory"
COMPARED = "every element of the whole call was compared with eager PyTorch"


def failed(report: Report) -> set[str]:
    return {each.name for each in report.checks if not each.ok}


def notes(report: Report) -> str:
    return "\n".join(report.notes)


@pytest.mark.parametrize("model", [ByRow, Together])
def test_right_candidates_pass_in_parts(model: type[ByRow]) -> None:
    report = verify(
        problem_of(model), candidate(model, backwards), device="cpu", seed=3, budget=SMALL
    )
    assert report.ok, [each for each in report.checks if not each.ok]
    names = {each.name for each in report.checks}
    results = ["output", "grad x0", "grad linear.weight", "grad norm.bias"]
    assert {f"{mode}: {each}" for mode in ("train", "eval") for each in results} <= names
    assert any(name.startswith("train, 16 of 64 rows: grad ") for name in names)
    said = next(each for each in report.notes if each.startswith("train"))
    assert PARTS in said and COMPARED in said
    assert "a call with 16 of 64 rows was checked against float64" in said
    coupled = model is Together
    assert ("its rows depend on each other" in said) == coupled
    assert ("all of its rows were compared with float64, in slices of 16" in said) != coupled
    # What the notes do not claim, the checks do not claim either.
    by_eager = {each.name for each in report.checks if not each.float64}
    assert ("train: grad x0" in by_eager) == coupled
    assert "eval: grad x0" not in by_eager


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("model", [ByRow, Together])
def test_wrong_candidates_fail_in_parts(model: type[ByRow], wrong: str) -> None:
    modes = ("eval",) if wrong == "eval" else ("train",)
    report = verify(
        problem_of(model),
        candidate(model, WRONG[wrong]),
        device="cpu",
        modes=modes,
        seed=5,
        budget=SMALL,
    )
    assert not report.ok
    what = "output" if "gradient" not in wrong or wrong == "without gradients" else "grad "
    wholes = {name for name in failed(report) if " of " not in name}
    assert wholes and all(what in name or "grad " in name for name in wholes)


class SlowTruth(ByRow):
    """Its float64 run takes 20 ms a row."""

    row_s = 0.02

    def rest(self, y: Tensor) -> Tensor:
        if y.dtype == torch.float64:
            time.sleep(self.row_s * len(y))
        return super().rest(y)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's time says nothing, and no scenario has more time than it is given."""
    monkeypatch.setattr(cases, "_SLOWDOWN", {"cpu": 1e6})
    monkeypatch.setattr(checker, "_LEAST_S", 0.3)


@pytest.mark.usefixtures("hasty")
def test_time_limits_the_rows_and_the_scenarios() -> None:
    problem, right = problem_of(SlowTruth), candidate(SlowTruth, backwards)
    report = verify(problem, right, device="cpu", seed=3, budget=Budget(seconds=1.5))
    assert report.ok, failed(report)
    said = notes(report)
    assert "a float64 run would take about" in said and COMPARED in said
    assert " of its rows were compared with float64" in said and "all of its rows" not in said
    left_out = next(each for each in report.notes if "not checked" in each)
    assert left_out.startswith("eval, no_grad, NaN; eval, new parameters; ")
    assert left_out.endswith(": not checked: the 1.5 s for checks were over")
    names = {each.name for each in report.checks}
    essential = ("train", "train, no_grad", "eval", "eval, no_grad")
    assert {f"{label}: output" for label in essential} <= names
    assert not any("new parameters" in each for each in names)


@pytest.mark.usefixtures("hasty")
def test_no_time_for_other_layouts_of_the_whole_call() -> None:
    class Slower(SlowTruth):
        row_s = 0.1

    right, budget = candidate(Slower, backwards), Budget(seconds=0.1)
    report = verify(problem_of(Slower), right, device="cpu", modes=("eval",), budget=budget)
    assert report.ok, failed(report)
    assert "time was over for gradients in other layouts" in notes(report)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("wrong", ["last row", "one row of the whole call", "gradient of a weight"])
def test_wrong_candidates_fail_in_time(wrong: str) -> None:
    new, budget = candidate(SlowTruth, WRONG[wrong]), Budget(seconds=1.0)
    report = verify(
        problem_of(SlowTruth), new, device="cpu", modes=("eval",), seed=3, budget=budget
    )
    assert not report.ok and "would take about" in notes(report)


class Products(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class ProductsNew(Products):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (b.t() @ a.t()).t()


def test_only_the_first_argument_has_rows() -> None:
    """Both matrices are square, so both seem to have 48 rows."""
    problem = problem_of(Products, (48, 48), (48, 48))
    report = verify(
        problem, ProductsNew, device="cpu", modes=("eval",), seed=1, budget=Budget(150_000)
    )
    assert report.ok, failed(report)
    assert "all of its rows were compared with float64" in notes(report)
    assert all(each.float64 for each in report.checks if each.name == "eval: grad x1")


class TooLarge(torch.autograd.Function):
    """A gradient that PyTorch refuses for many rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        if len(tangents[0]) > 20:
            raise RuntimeError("integer out of range")
        return tangents[0]


class EagerFails(ByRow):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(TooLarge.apply(x))


def test_gradients_that_eager_cannot_compute_are_checked_on_fewer_rows() -> None:
    problem = problem_of(EagerFails)
    report = verify(problem, candidate(EagerFails, backwards), device="cpu", seed=1)
    assert report.ok, failed(report)
    names = {each.name for each in report.checks}
    assert "train, 16 of 64 rows: grad x0" in names and "train: grad x0" not in names
    assert "train, no_grad: output" in names
    part = "a call with 16 of 64 rows was checked against float64"
    fails = "eager PyTorch fails on the whole call (integer out of range)"
    assert report.notes == (f"train; eval; eval, new parameters: {fails}; {part}",)
    wrong = candidate(EagerFails, WRONG["gradient of a weight"])
    assert not verify(problem, wrong, device="cpu", seed=1).ok


def test_a_model_that_fails_for_any_size_is_still_an_error() -> None:
    class Failing(ByRow):
        def rest(self, y: Tensor) -> Tensor:
            raise RuntimeError("no such layer")

    with pytest.raises(ProblemError, match="the model itself fails in train"):
        verify(problem_of(Failing), Failing, device="cpu", seed=1)


def out_of_memory(x: Tensor, rows: int) -> None:
    if len(x) > rows:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


class NoRoomForTruth(ByRow):
    def rest(self, y: Tensor) -> Tensor:
        out_of_memory(y, 10 if y.dtype == torch.float64 else ROWS)
        return super().rest(y)


class NoRoomForGradients(ByRow):
    def rest(self, y: Tensor) -> Tensor:
        out_of_memory(y, 20 if torch.is_grad_enabled() else ROWS)
        return super().rest(y)


def test_a_float64_run_that_runs_out_of_memory_is_made_smaller() -> None:
    problem, right = problem_of(NoRoomForTruth), candidate(ByRow, backwards)
    report = verify(problem, right, device="cpu", modes=("train",), seed=1)
    assert report.ok, failed(report)
    assert PARTS in notes(report) and COMPARED in notes(report)
    assert "a call with 8 of 64 rows was checked against float64" in notes(report)
    for wrong in ("one row of the whole call", "gradient of a weight"):
        new = candidate(ByRow, WRONG[wrong])
        assert not verify(problem, new, device="cpu", modes=("train",), seed=1).ok


def test_a_forward_that_runs_out_of_memory_is_checked_on_fewer_rows() -> None:
    problem, right = problem_of(NoRoomForGradients), candidate(ByRow, backwards)
    report = verify(problem, right, device="cpu", seed=1)
    assert report.ok and "forward does not fit into memory; 16 of the rows" in notes(report)


def test_a_candidate_that_runs_out_of_memory_is_checked_on_fewer_rows() -> None:
    def hungry(self: ByRow, x: Tensor) -> Tensor:
        out_of_memory(x, 32)
        return self.rest(self.linear(x))

    report = verify(problem_of(ByRow), candidate(ByRow, hungry), device="cpu", seed=1)
    assert report.ok, failed(report)
    assert "not all of the whole call was compared" in notes(report)
    assert not any(each.name == "train: output" for each in report.checks)

    def failing(self: ByRow, x: Tensor) -> Tensor:
        raise ValueError("kernel exploded")

    with pytest.raises(VerifyError, match="kernel exploded"):
        verify(problem_of(ByRow), candidate(ByRow, failing), device="cpu", budget=SMALL)


def test_a_candidate_that_falls_back_on_fewer_rows_shows_nothing_there() -> None:
    def particular(self: ByRow, x: Tensor) -> Tensor:
        if len(x) != ROWS:
            warnings.warn("the original forward runs: other sizes", RuntimeWarning, stacklevel=2)
        return self.rest(self.linear(x))

    report = verify(
        problem_of(ByRow), candidate(ByRow, particular), device="cpu", seed=1, budget=SMALL
    )
    assert report.ok
    assert "with 16 rows the candidate runs the original forward" in notes(report)
    assert not any(" of 64 rows" in each.name for each in report.checks)


class Drops(ByRow):
    def rest(self, y: Tensor) -> Tensor:
        return F.dropout(super().rest(y), 0.3, self.training)


def test_a_random_model_is_compared_with_eager_in_parts() -> None:
    problem = problem_of(Drops)
    assert verify(problem, Drops, device="cpu", seed=1, budget=SMALL).ok
    report = verify(problem, candidate(Drops, WRONG["train"]), device="cpu", seed=1, budget=SMALL)
    assert "train: output" in failed(report) and "eval: output" not in failed(report)


def test_inputs_that_find_no_memory_are_named() -> None:
    """The first draws are for the two modes, and for the essential scenarios of the first."""
    problem, drawn = problem_of(ByRow), []

    def draw() -> tuple[object, ...]:
        drawn.append(1)
        out_of_memory(torch.ones(len(drawn)), 5)
        return problem.make_inputs()

    hungry = replace(problem, make_inputs=draw)
    report = verify(hungry, ByRow, device="cpu", modes=("eval",), seed=1)
    assert report.ok and "not checked: memory ran out" in notes(report)
    assert {"eval: grad x0", "eval, no_grad: output"} <= {each.name for each in report.checks}


def test_a_smaller_call_that_is_all_nan_is_no_measure() -> None:
    """A row with NaN has NaN in all its results, and the smaller call has two rows."""
    problem, right = problem_of(ByRow), candidate(ByRow, backwards)
    for seed in range(6):
        report = verify(
            problem, right, device="cpu", modes=("eval",), seed=seed, budget=Budget(30_000)
        )
        assert report.ok, [each for each in report.checks if not each.ok]
