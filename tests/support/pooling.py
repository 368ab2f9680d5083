"""Pooling in training: plans, results with gradients, and inputs with ties, NaN and infinities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ProgramPlans
from fusewright.target.target import Target
from tests.support.plans import called_operators

Trained = tuple[Tensor, Tensor]  # a result and its input's gradient


def training_plans(model: nn.Module, x: Tensor, target: Target | None = None) -> ProgramPlans:
    target = target or Target.host()
    return prepare(model, (x,), modes=("train",), device=x.device, target=target).modes[0]


def calls_in_training(mode: ProgramPlans) -> list[str]:
    return called_operators(mode.forward, mode.backward)


def grad_output_of(y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return drawn.to(dtype or y.dtype).to(y)


def trained(model: nn.Module, *inputs: Tensor, dtype: torch.dtype | None = None) -> list[Trained]:
    given = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    made = model(*given)
    made = made if isinstance(made, tuple) else (made,)
    torch.autograd.backward(made, [grad_output_of(y, dtype) for y in made])
    return [(y.detach(), x.grad) for y, x in zip(made, given, strict=True) if x.grad is not None]


def same(ours: nn.Module, eager: nn.Module, *inputs: Tensor, words: Sequence[str] = ("",)) -> None:
    """Results have eager's bits: gradients are sums of the same terms, in the order of windows."""
    for word, mine, theirs in zip(
        words, trained(ours, *inputs), trained(eager, *inputs), strict=True
    ):
        same_bits(mine, theirs, word)


def same_bits(mine: Trained, theirs: Trained, words: str = "") -> None:
    for found, expected in zip(mine, theirs, strict=True):
        assert found.stride() == expected.stride() and found.dtype == expected.dtype, words
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{words}\n{m}"
        )


def as_exact(mine: Trained, theirs: Trained, exact: Tensor) -> None:
    """Values equal eager's; gradients are as near to float64's as eager's."""
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0, equal_nan=True)
    errors = [float((each[1].double() - exact).norm()) for each in (mine, theirs)]
    assert errors[0] <= 1.01 * errors[1] + 1e-7 * float(exact.norm()), errors
    far = 8 * torch.finfo(mine[1].dtype).eps
    torch.testing.assert_close(mine[1].double(), exact, rtol=far, atol=far)
    assert mine[1].stride() == theirs[1].stride()


def hard_inputs(x: Tensor) -> list[Tensor]:
    """Ties, signed zeros, NaN beside NaN, and windows of nothing but -Inf."""
    ties = torch.randint_like(x, -2, 3)
    zeros = torch.where(torch.rand_like(x) < 0.5, 0.0, -0.0).to(x.dtype)
    poisoned = x.clone()
    poisoned[torch.rand_like(x) < 0.2] = math.nan
    poisoned[torch.rand_like(x) < 0.2] = math.inf
    low = torch.where(torch.rand_like(x) < 0.9, -math.inf, x)
    return [ties, zeros, poisoned, low, torch.full_like(x, -math.inf)]
