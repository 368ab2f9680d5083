"""A model, its optimized twin, and whether a call of both gives the same result or error."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fusewright

COLUMNS = 8


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x)) * self.scale
        return (y - y.mean(-1, keepdim=True)) * torch.tanh(x)


Pair = tuple[nn.Module, nn.Module]


@functools.cache
def pair() -> Pair:
    """The model and the optimized one, with parameters of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Chain()
        return model, fusewright.optimize(copy.deepcopy(model), torch.randn(6, COLUMNS))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def answer(run: Callable[[], Any]) -> Any:
    """The result, or the class of the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return run()
        except Exception as error:
            return type(error)


def trained(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of the parameters."""
    x = x.detach()
    x.requires_grad_(x.is_floating_point() or x.is_complex())
    y = module(x)
    tangent = torch.cos(torch.arange(y.numel(), device=y.device)).to(y.dtype).view(y.shape)
    wanted = [each for each in (x, *module.parameters()) if each.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, tangent)]


def assert_alike(ours: Any, eager: Any) -> None:
    if isinstance(eager, type):
        assert ours is eager
        return
    assert isinstance(ours, list | tuple) and len(ours) == len(eager)
    for one, other in zip(ours, eager, strict=True):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        if other.device.type == "meta":
            continue
        near = {"rtol": 1e-5, "atol": 1e-4}  # sums over many rows
        if other.dtype.itemsize == 2:
            near = {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(one, other, equal_nan=True, **near)
