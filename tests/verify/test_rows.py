"""The rows of a batch: which arguments have them, and whether they depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.verify.feeds import Feed
from fusewright.verify.reference import Reference
from fusewright.verify.rows import (
    Batch,
    are_independent,
    possible_batches,
    sample_rows,
    worst_rows,
)
from fusewright.verify.scenarios import Scenario
from fusewright.verify.wide import WideModel
from tests.support.verified import ByRow, Together


class Function(nn.Module):
    def __init__(self, run: object) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> object:
        assert callable(self.run)
        return self.run(x)


def independent(model: nn.Module, mode: str = "train", shape: tuple[int, ...] = (24, 40)) -> bool:
    x = torch.randn(shape)
    reference = Reference(model, Feed(((x,),), seed=0), 0, mode)
    question = reference.question(Scenario(gradients=True, mode=mode), (x,))
    assert question is not None
    batch = next(possible_batches((x,)))
    return are_independent(WideModel(model, True), question, batch)


def test_rows_that_do_not_meet_are_independent() -> None:
    assert independent(ByRow()) and independent(ByRow(), "eval")
    assert independent(Together(), "eval")
    # As many channels as rows are tried, and as many features as there are rows.
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    assert independent(conv, shape=(24, 3, 9, 9))
    assert independent(nn.Linear(40, 24))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x / x.norm(),
        lambda x: x.tanh().mean(),
        lambda x: x - x.amax(0),
        lambda x: x.cumsum(0),
        lambda x: x * (x > x.median()),
        lambda x: x[x[:, 0].argsort()],
        lambda x: x + 1e-6 * x.mean(0),
        lambda x: (x, x.sum(0)),
        lambda x: x.t() * 2,
        lambda x: x.roll(1, 0),
    ],
)
def test_rows_that_meet_are_not(run: object) -> None:
    assert not independent(Function(run))


def test_batch_statistics_join_rows() -> None:
    assert not independent(Together())
    assert not independent(nn.BatchNorm2d(3), shape=(24, 3, 8, 8))


def test_the_first_and_the_last_row_are_in_every_sample() -> None:
    for count in range(2, 9):
        found = sample_rows(30, count, seed=count).tolist()
        assert found == sorted(set(found)) and len(found) == count
        assert found[0] == 0 and found[-1] == 29
    assert sample_rows(5, 1, 0).tolist() == [0]
    assert sample_rows(2, 2, 0).tolist() == [0, 1]
    assert sample_rows(100, 20, 0).tolist() != sample_rows(100, 20, 1).tolist()


def test_arguments_with_rows() -> None:
    inputs = (torch.randn(6, 3), {"m": torch.randn(6), "w": torch.randn(3)}, torch.ones(()), 5)
    every, first = possible_batches(inputs)
    assert every == Batch(6, frozenset({"x0", "x1['m']"}))
    assert first == Batch(6, frozenset({"x0"}))
    x, more, scalar, number = every.part(inputs, slice(2, 4))
    assert isinstance(x, Tensor) and isinstance(more, dict)
    assert x.shape == (2, 3) and more["m"].shape == (2,) and more["w"].shape == (3,)
    assert (scalar, number) == (inputs[2], 5)
    assert list(possible_batches((torch.ones(()), torch.ones(1, 3)))) == []


def test_the_worst_rows_are_found() -> None:
    eager = {
        "output": torch.randn(50, 4),
        "grad x0": torch.randn(50, 2, 3),
        "grad w": F.one_hot(torch.arange(50)).float(),
    }
    ours = {name: each.clone() for name, each in eager.items()}
    ours["output"][17, 2] += 1e-4
    ours["grad x0"][49, 1, 1] -= 1e-4
    ours["grad w"][3] += 1
    batch = Batch(50, frozenset({"x0"}))
    assert worst_rows(ours, eager, batch) == {17, 49}
    ours["output"][5, 0] = torch.nan
    assert worst_rows(ours, eager, batch) == {5, 49}
