"""Concatenated tensors and the loop that reads them, as one loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from tests.support.models import Lambda, ParametricLambda
from tests.support.plans import host_plans, loops_and_calls


@pytest.mark.parametrize(
    "function",
    [
        lambda m, a, b: F.leaky_relu(torch.cat([a, b], 1)),
        lambda m, a, b: torch.cat([a, b, a], -2) * 2,
        lambda m, a, b: torch.cat([torch.sigmoid(a), b.exp()], 1).sum((0, 2)),
        lambda m, a, b: torch.cat([a, b], 1).transpose(1, 2) + 1,
        lambda m, a, b: torch.cat([a.half(), b], 1).abs(),  # types meet
        lambda m, a, b: torch.cat([a, b[:, :0], b], 1).neg(),
        lambda m, a, b: F.softmax(torch.cat([a, b], 1), -1),
        lambda m, a, b: torch.cat([a, b], 1).view(-1, 2, 4, 8).amax(1),
    ],
)
def test_a_concatenation_is_part_of_the_loop_that_follows(function) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    a, b = torch.randn(4, 5, 8), torch.randn(4, 3, 8)
    a[0, 0], b[1, 2] = -0.0, torch.nan
    a[2, 1, 3] = torch.inf
    model = ParametricLambda(function)
    assert loops_and_calls(host_plans(function, a, b, mode="eval")[0]) == ["loop"]
    fast = fusewright.optimize(copy.deepcopy(model), (a, b), modes=("train",))
    for size in (4, 7):
        a, b = a[:1].expand(size, -1, -1).clone(), b[:1].expand(size, -1, -1).clone()
        given = [(x.clone().requires_grad_(), y.clone().requires_grad_()) for x, y in [(a, b)] * 2]
        mine, eager = fast(*given[0]), model(*given[1])
        torch.testing.assert_close(mine, eager, equal_nan=True)
        assert torch.equal(mine.signbit() & (mine == 0), eager.signbit() & (eager == 0))
        gradient = torch.randn_like(eager)
        for each in (mine, eager):
            each.backward(gradient)
        for x, y in zip(*given, strict=True):
            torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, a, b: torch.cat([a, b], 1),  # nothing computes with it
        lambda m, a, b: torch.cat([a[:, :3], b], -1) + 1,  # along the contiguous axis
        lambda m, a, b: torch.cat([a[:, :3], b], 0) + 1,  # of sizes that change
        lambda m, a, b: torch.cat([b] * 9, 1) + 1,  # of many tensors
    ],
)
def test_other_concatenations_stay_calls(function) -> None:  # type: ignore[no-untyped-def]
    a, b = torch.randn(4, 5, 8), torch.randn(4, 3, 8)
    assert "call" in loops_and_calls(host_plans(function, a, b, mode="eval")[0])


def test_a_concatenation_of_one_tensor_is_a_copy() -> None:
    inference, _, _ = host_plans(lambda m, x: torch.cat([x.exp()], 1) @ x, torch.randn(9, 9))
    assert loops_and_calls(inference) == ["loop", "call"]
    model, x = Lambda(lambda x: torch.cat([x], 1)), torch.randn(3, 4)
    given = fusewright.optimize(model, (x,), modes=("train",))(x)
    assert torch.equal(given, x) and given.data_ptr() != x.data_ptr()


def test_a_concatenation_with_an_empty_tensor_is_a_copy() -> None:
    def function(m: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([a.transpose(1, 2), b[:, :0]], 1)
        return whole, whole + 1

    model, a = ParametricLambda(function), torch.randn(3, 4, 5)
    fast = fusewright.optimize(model, (a, a.mT), modes=("train",))
    wanted = model(a, a.mT)[0]
    given = fast(a, a.mT)[0]
    assert torch.equal(given, wanted) and given.stride() == wanted.stride()
    given.zero_()
    assert a.all()


class Dense(nn.Module):
    """Each layer reads what all before it have made."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (6, 10, 14)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes)
        self.layers = nn.ModuleList(nn.Conv2d(size, 4, 3, padding=1) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            made.append(layer(torch.relu(norm(torch.cat(made, 1)))))
        return torch.cat(made, 1).mean((2, 3))


def test_dense_blocks_train() -> None:
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(3, 6, 7, 9)
    fast = fusewright.optimize(copy.deepcopy(model), (x,), modes=("train",))
    double = copy.deepcopy(model).double()
    results = []
    for each, given in ((fast, x), (double, x.double())):
        each(given).sin().sum().backward()
        results.append([p.grad for p in each.parameters()])
    for mine, exact in zip(*results, strict=True):
        assert mine is not None and exact is not None
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)
