"""Gradients lie in memory as eager's do, if the gradient of the output lies as the output does."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusewright
from tests.support.models import Lambda

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "transpose": lambda x: x.transpose(0, 2).exp(),
    "permute": lambda x: x.permute(2, 0, 1) * 2,
    "rot90": torch.rot90,
    "movedim": lambda x: x.movedim(0, -1).sin(),
    "slice of a transpose": lambda x: x.mT[:, 1:] + 1,
    "expand": lambda x: (x.mT + 1)[:, :, :1].expand(-1, -1, 4),
    "channels last": lambda x: x[:, :, None].to(memory_format=torch.channels_last).relu(),
    "reduction": lambda x: x.mT.sum(-1, keepdim=True) * x.mT,
}


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = function(x)
    (found,) = torch.autograd.grad(y, x, torch.full_like(y, 0.5))
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_have_eagers_strides(name: str) -> None:
    function = FUNCTIONS[name]
    x = torch.randn(5, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fast = fusewright.optimize(Lambda(function), (x,), modes=("train",))
        for given in (x, torch.randn(7, 3, 4)):
            found, expected = gradient(fast, given), gradient(function, given)
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()


def test_gradients_of_other_layouts_are_right() -> None:
    """The gradient of the output may still come in any layout."""
    fast = fusewright.optimize(Lambda(FUNCTIONS["permute"]), (torch.randn(5, 3, 4),))
    x = torch.randn(5, 3, 4, requires_grad=True)
    given = torch.randn(4, 5, 3)
    (found,) = torch.autograd.grad(fast(x), x, given)
    assert torch.equal(found, 2 * given.permute(1, 2, 0))
