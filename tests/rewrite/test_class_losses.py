"""Losses by class inside the loops of the softmax, on the host."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
import fusewright.rewrite.lower
from fusewright.capture import losses
from tests.support.models import Lambda
from tests.support.plans import pytorch_operators

lower: Any = sys.modules["fusewright.rewrite.lower"]  # the package has a function of that name
SHAPES = {"rows": (7, 11), "images": (3, 5, 4, 6), "sequences": (3, 5, 8)}


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOOPS", ("cpu", "cuda"))


class Head(nn.Module):
    """An operator with a gradient before many losses: scores are not an input."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, classes))
        weights, every = torch.rand(classes), ("mean", "sum", "none")
        made = [
            nn.CrossEntropyLoss(weight, reduction=reduction, ignore_index=-100 if at % 2 else 2)
            for at, (weight, reduction) in enumerate(itertools.product((None, weights), every))
        ]
        self.losses = nn.ModuleList([*made, nn.CrossEntropyLoss(label_smoothing=0.1)])

    def forward(self, x: Tensor, target: Tensor, other: Tensor) -> list[Tensor]:
        scores = x * self.scale.view(-1, *[1] * (x.dim() - 2))
        return [
            loss(scores, target if loss.ignore_index == -100 else other) for loss in self.losses
        ]


def results(model: nn.Module, x: Tensor, *targets: Tensor) -> list[Tensor]:
    """Losses, and the gradients of their sum, in which each has a weight of its own."""
    leaf = x.clone().requires_grad_()
    found: list[Tensor] = model(leaf, *targets)
    (sum((at + 1) * each.sum() for at, each in enumerate(found)) / len(found)).backward()  # type: ignore[union-attr]
    gradients = [each.grad for each in (leaf, *model.parameters()) if each.grad is not None]
    assert len(gradients) == 2
    return [*(each.detach() for each in found), *gradients]


@pytest.mark.sample(3)
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy(shape: str) -> None:
    """Means, sums and single losses, with and without weights and ignored classes."""
    torch.manual_seed(11)
    sizes = SHAPES[shape]
    x, target = torch.randn(sizes), torch.randint(sizes[1], (sizes[0], *sizes[2:]))
    other = target.clone()
    target.view(-1)[1], other.view(-1)[1] = -100, 2
    model = Head(sizes[1])
    optimized = fusewright.optimize(model, (x.clone().requires_grad_(), target, other))
    found = results(optimized, x, target, other)
    exact = results(copy.deepcopy(model).double(), x.double(), target, other)
    for theirs, mine in zip(exact, found, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=3e-6, atol=3e-6)
    assert not any(
        "nll" in op for op in pytorch_operators(model, x.requires_grad_(), target, other)
    )


@pytest.mark.usefixtures("loops")
def test_special_values_and_ignored_classes(dtype: torch.dtype = torch.float64) -> None:
    """Scores of -Inf and NaN; only ignored classes; another batch."""
    model = Lambda(lambda x, t: F.cross_entropy(x, t))
    x, target = torch.randn(4, 6, dtype=dtype), torch.tensor([1, 5, 0, 3])
    optimized = fusewright.optimize(model, (x, target))
    x[0, 2], x[1, 5] = -torch.inf, -torch.inf
    assert optimized(x, target) == torch.inf == model(x, target)
    x[1, 0] = torch.nan
    assert optimized(x, target).isnan()
    none = torch.full((4,), -100)
    assert optimized(torch.randn(4, 6, dtype=dtype), none).isnan()
    more, classes = torch.randn(33, 6, dtype=dtype), torch.randint(6, (33,))
    torch.testing.assert_close(optimized(more, classes), model(more, classes))


@pytest.mark.usefixtures("loops")
def test_broadcast_scores() -> None:
    """A part of the scores has fewer dimensions."""
    model = Lambda(lambda a, b, t: F.nll_loss(a - b.exp(), t, reduction="none"))
    a, b, t = torch.randn(1, 5, 4), torch.randn(4, 1, 4), torch.randint(5, (4, 4))
    torch.testing.assert_close(fusewright.optimize(model, (a, b, t))(a, b, t), model(a, b, t))
    over = Lambda(lambda x, t: F.nll_loss(x - x.logsumexp((0, 1), keepdim=True), t))
    x, t = torch.randn(2, 5, 3), torch.randint(5, (2, 3))
    torch.testing.assert_close(fusewright.optimize(over, (x, t))(x, t), over(x, t))


@pytest.mark.usefixtures("loops")
def test_the_weight_of_an_ignored_class_is_not_read() -> None:
    weights = torch.tensor([1.0, torch.inf, 2, 3, 4])
    model = Lambda(lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=1))
    x, t = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
    optimized = fusewright.optimize(model, (x, t, weights))
    (mine,) = torch.autograd.grad(optimized(x, t, weights), x)
    (theirs,) = torch.autograd.grad(model(x, t, weights), x)
    torch.testing.assert_close(mine, theirs)


def test_a_read_at_a_class_index_is_never_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no loop can contain it, as on a second device: an emitted file lacks the operator."""
    monkeypatch.setattr(losses, "LOOPS", ("cpu", "cuda"))
    plain = lower._on_main_device
    monkeypatch.setattr(
        lower, "_on_main_device", lambda b, n, d: n.op != lower.CLASS_INDEX and plain(b, n, d)
    )
    model = Lambda(lambda x, t: F.cross_entropy(x, t))
    x, t = torch.randn(5, 7), torch.randint(7, (5,))
    assert not pytorch_operators(model, x, t)
    torch.testing.assert_close(fusewright.optimize(model, (x, t))(x, t), model(x, t))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x, t: F.nll_loss(x, t), torch.float32),  # would read a whole row for one element
        (lambda x, t: F.nll_loss(x * 2, t), torch.float32),
        (lambda x, t: F.cross_entropy(x, t), torch.bfloat16),
    ],
)
def test_which_losses_stay_pytorchs(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, target = torch.randn(5, 7).to(dtype), torch.randint(7, (5,))
    assert "aten.nll_loss_forward.default" in pytorch_operators(Lambda(function), x, target)
    found = fusewright.optimize(Lambda(function), (x, target))(x, target)
    torch.testing.assert_close(found, function(x, target))


def test_the_host_names_a_class_out_of_range() -> None:
    model = Lambda(lambda x, t: F.cross_entropy(x, t))
    x, target = torch.randn(5, 7), torch.randint(7, (5,))
    optimized = fusewright.optimize(model, (x, target))
    target[3] = 7
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        optimized(x, target)
