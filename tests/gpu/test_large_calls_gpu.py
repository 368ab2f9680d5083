"""Checks of calls that fill the GPU: in parts, in time, and no error where memory runs out."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from fusewright.verify.budget import Budget, budget_of
from fusewright.verify.feeds import make_inputs
from fusewright.verify.verify import verify
from tests.support.verified import problem_of

DEVICE = torch.device("cuda", 0)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class LastRow(Swish):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y[:-1], y[-1:] * 1.001])


class Norm(nn.Module):
    """Every element depends on all."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm()


def rows_for(share: float, columns: int) -> int:
    """So many rows that the input takes this share of the GPU's memory."""
    _, total = torch.cuda.mem_get_info(DEVICE)
    return int(total * share) // (4 * columns)


def test_inputs_are_drawn_on_the_gpu() -> None:
    (x,) = make_inputs(problem_of(Swish, (4, 5)), DEVICE)
    assert isinstance(x, Tensor) and x.device == DEVICE


@pytest.mark.parametrize(
    ("model", "candidate", "ok"),
    [(Swish, Swish, True), (Swish, LastRow, False), (Norm, Norm, True)],
)
def test_inputs_of_a_twentieth_of_the_memory(
    model: type[nn.Module], candidate: type[nn.Module], ok: bool
) -> None:
    """A float64 run of the whole call would need more memory than there is."""
    problem, start = problem_of(model, (rows_for(0.05, 65536), 65536)), time.monotonic()
    report = verify(problem, candidate, device=DEVICE, seed=1, budget=budget_of(DEVICE, 45.0))
    assert report.ok is ok, [each for each in report.checks if not each.ok]
    assert time.monotonic() - start < 60
    said = "\n".join(report.notes)
    assert "a float64 run does not fit into memory" in said
    assert "every element of the whole call was compared with eager PyTorch" in said
    assert ("all of its rows were compared with float64" in said) == (model is Swish)


def test_a_budget_that_promises_too_much_is_no_error() -> None:
    """Without a limit the float64 run is tried, fails for lack of memory, and is made smaller."""
    problem = problem_of(Swish, (rows_for(0.06, 65536), 65536))
    report = verify(problem, Swish, device=DEVICE, modes=("eval",), seed=1, budget=Budget())
    assert report.ok, [each for each in report.checks if not each.ok]
    assert "does not fit into memory" in "\n".join(report.notes)
