"""Models that change themselves or their arguments and once gave wrong results or crashed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fusewright
from tests.support.models import Lambda
from tests.support.regressions import check

# Forward that changes its own module ----------------------------------------------------------


class Assigns(nn.Module):
    """Buffers that forward binds to new tensors instead of writing into them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x * self.count - self.average


class AssignsHistory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.register_buffer("state", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state + self.weight
        return x * self.state


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last + 1


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x + 1


def test_a_buffer_that_is_assigned_anew_keeps_its_new_value() -> None:
    check(Assigns(), torch.randn(4, 5))


@pytest.mark.parametrize("kind", [Counts, AssignsHistory])
def test_what_one_graph_cannot_describe_is_as_in_eager(kind: type[nn.Module]) -> None:
    """A number that changes what forward computes; a buffer that keeps its gradient history."""
    model, theirs = kind(), kind()
    theirs.load_state_dict(model.state_dict())
    fast = fusewright.optimize(model, torch.randn(4, 5))
    assert getattr(model, "calls", 0) == 0
    for rows in (4, 6, 4):
        x = torch.randn(rows, 5, requires_grad=True)
        again = x.detach().requires_grad_()
        results = fast(x), theirs(again)
        torch.testing.assert_close(*results)
        for each in results:
            each.sum().backward(retain_graph=True)
        torch.testing.assert_close(x.grad, again.grad)
        assert getattr(fast, "calls", None) == getattr(theirs, "calls", None)
    for mine, wanted in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)
    torch.testing.assert_close(fast.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("kind", [Caches, Collects])
def test_what_forward_keeps_is_kept_after_each_call(kind: type[nn.Module]) -> None:
    model = kind()
    fast = fusewright.optimize(model, torch.randn(4, 5))
    assert getattr(model, "last", None) is None and not getattr(model, "seen", [])
    theirs = kind()
    for rows in (4, 6):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(fast(x), theirs(x))
        for name in ("last", "seen"):
            torch.testing.assert_close(getattr(fast, name, []), getattr(theirs, name, []))


def test_state_that_pytorchs_layers_keep_is_no_change() -> None:
    model, x = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 4)), nn.ReLU()), torch.randn(3, 5)
    torch.testing.assert_close(fusewright.optimize(model, x, modes=("train",))(x), model(x))
    check(nn.GRU(4, 3, batch_first=True), torch.randn(2, 3, 4))


def test_an_argument_that_the_model_writes_to() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(y)
        x[:, 1].zero_()
        return x * y, x

    check(Lambda(model), torch.randn(4, 5), torch.randn(4, 5))


def test_a_tensor_that_is_changed_and_given_twice_is_as_in_eager() -> None:
    def model(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * b

    fast = fusewright.optimize(Lambda(model), (torch.zeros(3), torch.ones(3)), modes=("train",))
    y = torch.zeros(3)
    with torch.no_grad():
        assert torch.equal(fast(y, y), torch.ones(3))
    assert torch.equal(y, torch.ones(3))


# Modes ----------------------------------------------------------------------------------------


class FrozenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


def test_a_batch_norm_that_never_trains() -> None:
    check(FrozenNorm(), torch.randn(4, 5))


def test_a_batch_norm_that_is_frozen_by_hand() -> None:
    model, x = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), torch.randn(4, 5)
    model[1].eval()
    fast = fusewright.optimize(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(x), model(x))
        fast.train()
        before = model[1].running_mean.clone()
        fast(x)
    assert not torch.equal(model[1].running_mean, before)


class TiedModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) + self.first.weight


def test_one_module_under_two_names() -> None:
    check(TiedModules(), torch.randn(5, 5))
