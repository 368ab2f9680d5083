"""A batch of one: questions of broadcasting need no guard, and those of forward do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from tests.support.models import Lambda, ParametricLambda


def asks_after_broadcasting(x: Tensor) -> Tensor:
    y = x + x.mean(0, keepdim=True) + torch.broadcast_to(x, (x.shape[0], 4))
    return y * 2 if x.shape[0] != 1 else y * 3


def squeezes_after_broadcasting(x: Tensor) -> Tensor:
    return (x + x.mean(0, keepdim=True)).squeeze(0)


@pytest.mark.parametrize("function", [asks_after_broadcasting, squeezes_after_broadcasting])
def test_a_question_of_forward_is_guarded_even_if_broadcasting_asked_first(
    function: Callable[..., Tensor],
) -> None:
    model = Lambda(function)
    fast = fusewright.optimize(model, torch.randn(5, 4), modes=("train",))
    for rows in (5, 1, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x), model(x))


FREE: dict[str, nn.Module] = {
    "bias": ParametricLambda(lambda m, x: torch.relu(x + m.bias), bias=torch.randn(4)),
    "linear": nn.Linear(4, 3),
    "softmax": nn.Softmax(0),
    "mean": Lambda(lambda x: x - x.mean(0)),
    "total": Lambda(lambda x: x.sum()),
    "cat": Lambda(lambda x: torch.cat([x, x * 2], 1)),
}


@pytest.mark.parametrize("name", FREE)
def test_a_batch_of_one_runs_the_same_program(name: str) -> None:
    program = capture(FREE[name], (torch.randn(5, 4),), mode="train")
    assert program.symbols, "the batch is symbolic"
    values = {program.symbols[0].name: 1}
    assert all(eval(guard, {}, values) for guard in program.guards), program.guards
