"""A small network of equal blocks, and the three ways in which our kernels can run it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.compile.backend import backend

WIDTH = 8
ROWS = 4
# By programs of our own, by way of Dynamo, and as the back-end of torch.compile.
ROUTES = ("programs", "dynamo", "torch.compile")


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.head(self.b(self.a(x))), -1)


class Configured(Net):
    """Reads an object that only Dynamo guards."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        scale: float = self.settings.scale
        return super().forward(x) * scale


def example(rows: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def eager(route: str) -> nn.Module:
    """The model of a route; always with the same parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Configured() if route == "dynamo" else Net()


@functools.cache
def _optimized(route: str) -> nn.Module:
    return fusewright.optimize(eager(route), example())


def ours(route: str) -> tuple[nn.Module, Callable[..., Any]]:
    """The model, and what runs it with our kernels. Copies share the programs."""
    if route == "torch.compile":
        model = eager(route)
        return model, torch.compile(model, backend=backend)
    model = copy.deepcopy(_optimized(route))
    return model, model


def train(model: nn.Module, run: Callable[..., Any], x: Tensor | None = None) -> list[Any]:
    """The output, and the gradients of the argument and of all parameters."""
    x = (example() if x is None else x).clone().requires_grad_()
    model.zero_grad()
    y = run(x)
    weigh(y).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [y.detach(), None if x.grad is None else x.grad.clone(), *gradients]


def weigh(y: Tensor) -> Tensor:
    """A loss that tells all elements apart."""
    return (y * torch.arange(y.numel()).reshape(y.shape).add(1).sqrt()).sum()
