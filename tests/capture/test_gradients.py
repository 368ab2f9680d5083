"""Decomposed operators beside PyTorch's kernels, where functions are flat, steep or undefined."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusewright
from fusewright.capture import capture
from fusewright.capture.decompositions import decomposition_table
from fusewright.capture.gradients import cumprod_gradient
from tests.support.models import Lambda

_SIZES = (0.0, 1e-30, 1e-6, 0.3, 0.5, 1.0, 2.0, 3.0, 6.0, 12.0, 15.0, 20.0, 50.0, 90.0, 1e4, 1e10)
POINTS = torch.tensor([sign * each for each in _SIZES for sign in (1, -1)] + [math.nan])
# More than rounding, and more than eager is off.
_WORSE, _ROUNDING = 4.0, 2e-6


class _Decomposed(TorchDispatchMode):
    """Operators are replaced as in a capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return decomposition_table().get(func, func)(*args, **(kwargs or {}))


def _loss(name: str, reduction: str, **settings: Any) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        if name == "binary_cross_entropy":  # refuses NaN
            x = x.nan_to_num().sigmoid()
        target = torch.ones_like(x).detach()
        value: Tensor = getattr(F, name)(x, target, reduction=reduction, **settings)
        return value

    return loss


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        each: getattr(F, each)
        for each in """gelu silu mish elu celu selu hardtanh hardswish hardsigmoid hardshrink
        softshrink softplus leaky_relu relu6 logsigmoid tanhshrink softsign""".split()
    },
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "logit": torch.logit,
    "logit, cut off": lambda x: torch.logit(x, 1e-6),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "glu": lambda x: F.glu(torch.stack([x.flip(0), x], -1)),
    "xlogy": lambda x: torch.xlogy(x, x),
    "softmax": lambda x: torch.stack([x, x / 2, x * 0], 1).softmax(1),
    "log_softmax": lambda x: torch.stack([x, x / 2, x * 0], 1).log_softmax(1),
    "logaddexp": lambda x: torch.logaddexp(x, torch.ones_like(x)),
    "norm": lambda x: torch.stack([x, x / 2], 1).norm(dim=1),
    "smooth_l1_loss, beta": _loss("smooth_l1_loss", "sum", beta=2.5),
    **{
        f"{name} {reduction}": _loss(name, reduction)
        for name in """mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits hinge_embedding_loss""".split()
        for reduction in ("none", "sum", "mean")
    },
}


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, decomposed: bool) -> Tensor:
    x = x.clone().requires_grad_()
    with _Decomposed() if decomposed else contextlib.nullcontext():
        y = function(x)
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return found.double()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_decomposed_gradients_are_no_worse_than_eagers(name: str) -> None:
    function = FUNCTIONS[name]
    exact = _gradient(function, POINTS.double(), False)
    eager, ours = (_gradient(function, POINTS, each) for each in (False, True))
    # Where eager alone has no number, a number is better.
    known = ~(eager.isnan() & ~POINTS.isnan())
    assert torch.equal(ours.isnan()[known], eager.isnan()[known])
    sized = known & exact.isfinite() & (exact.abs() > 1e-37)
    errors = [((each - exact) / exact).abs()[sized] for each in (eager, ours)]
    assert (errors[1] <= _WORSE * errors[0] + _ROUNDING).all()


def test_kernels_keep_the_digits_and_the_nan() -> None:
    """The same for two losses in kernels."""

    def losses(x: Tensor) -> Tensor:
        x, y = x.unbind(1)
        ones = torch.ones_like(x).detach()
        return F.soft_margin_loss(x, ones) + F.smooth_l1_loss(y, ones)

    fast = fusewright.optimize(Lambda(losses), (torch.randn(4, 2),))
    x = torch.tensor([[12.0, 0.5], [20.0, 20.0], [1.0, math.nan]])
    expected, found = (_gradient(each, x, False) for each in (losses, fast))
    assert torch.allclose(found, expected, rtol=1e-6, atol=0, equal_nan=True)


class _Warped(nn.Module):
    """A spatial transformer, whose gradient PyTorch traces only with numbers as sizes."""

    def __init__(self, spatial: tuple[int, ...], align_corners: bool) -> None:
        super().__init__()
        self.spatial, self.align_corners = spatial, align_corners

    def forward(self, theta: Tensor) -> Tensor:
        size = (theta.shape[0], 3, *self.spatial)
        return F.affine_grid(theta, size, align_corners=self.align_corners).tanh()


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("spatial", [(4, 5), (1, 3), (2, 3, 4)])
def test_affine_grids_of_any_batch(spatial: tuple[int, ...], align_corners: bool) -> None:
    model = _Warped(spatial, align_corners)
    theta = torch.randn(2, len(spatial), len(spatial) + 1)
    fast = fusewright.optimize(model, (theta,), modes=("train",))
    assert not fusewright.explain(fast).breaks
    for batch in (2, 5):
        one, other = (torch.randn(batch, *theta.shape[1:]).requires_grad_() for _ in range(2))
        other.data.copy_(one.data)
        fast(one).square().sum().backward()
        model(other).square().sum().backward()
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_cumulative_products_with_zeros(dim: int, dtype: torch.dtype) -> None:
    """Rows and columns without a zero, with one at either end, with two, and with NaN."""
    x = torch.rand(7, 7, dtype=dtype) + 0.5
    x[1, 3] = x[2, 0] = x[3, 6] = x[4, 2] = x[4, 5] = x[0, 0] = 0.0
    x[5, 1], x[5, 4], x[6, 6] = math.nan, 0.0, math.inf
    x.requires_grad_()
    y = torch.cumprod(x, dim)
    grad = torch.rand_like(y) - 0.5
    (expected,) = torch.autograd.grad(y, x, grad)
    found = cumprod_gradient(grad, x.detach(), dim, y.detach())
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_long_cumulative_product_is_traced_in_few_steps() -> None:
    program = capture(
        Lambda(lambda x: (x * 0.1 + 1).cumprod(1)), (torch.rand(3, 4001),), mode="train"
    )
    assert program.backward is not None and len(program.backward.nodes) < 60
