"""Losses by class, and indices of largest and smallest values, on a GPU."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from tests.support.models import ARG_EXTREMES, Lambda
from tests.support.plans import pytorch_operators


@pytest.mark.parametrize("name", ARG_EXTREMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((64, 1000), 1), ((33, 50257), 1), ((16, 512, 257), 1), ((4000, 77), 0), ((2, 3_000_001), 1)],
)
def test_indices(name: str, dtype: str, shape: tuple[int, ...], dim: int) -> None:
    x = (torch.randn(shape, device="cuda") * 30).round().to(getattr(torch, dtype))
    model = Lambda(lambda x: ARG_EXTREMES[name](x, dim))
    found = fusewright.optimize(model, (x,))(x)
    assert torch.equal(found, ARG_EXTREMES[name](x, dim))
    assert not pytorch_operators(model, x)


@pytest.mark.parametrize("dim", [1, 2])
def test_values_and_indices(dim: int) -> None:
    x = torch.randn(16, 300, 123, device="cuda").round()

    def both(x: Tensor) -> tuple[Tensor, ...]:
        return (*torch.max(x, dim), *torch.min(x, dim, keepdim=True))

    results = []
    for model in (Lambda(both), fusewright.optimize(Lambda(both), (x.clone().requires_grad_(),))):
        leaf = x.clone().requires_grad_()
        largest, place, smallest, other = model(leaf)
        (largest.sum() * 3 + (smallest * smallest).sum()).backward()
        results.append((largest, place, smallest, other, leaf.grad))
    for theirs, mine in zip(*results, strict=True):
        assert torch.equal(theirs, mine)
    left = pytorch_operators(Lambda(both), x.requires_grad_())
    assert left == [] if dim == 2 else "aten.value_selecting_reduction_backward.default" in left


LOSSES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows": ((4096, 1000), {}),
    "many classes": ((300, 50257), {"label_smoothing": 0.1}),
    "images": ((8, 21, 128, 96), {"reduction": "sum"}),
    "weights": ((512, 37, 50), {"weight": True, "ignore_index": 3}),
    "one by one": ((1000, 10), {"reduction": "none"}),
}


def results(model: Callable[..., Tensor], x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    loss = model(leaf, target)
    loss.backward(torch.linspace(1, 2, loss.numel(), device="cuda").to(loss).view(loss.shape))
    assert leaf.grad is not None
    return loss.detach().double(), leaf.grad.double()


@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name: str) -> None:
    torch.manual_seed(1)
    shape, given = LOSSES[name]
    given = dict(given)
    weights = torch.rand(shape[1]) if given.pop("weight", False) else None
    model = nn.CrossEntropyLoss(weights, **given).cuda()
    x = torch.randn(shape, device="cuda") * 3
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device="cuda")

    exact = results(copy.deepcopy(model).double(), x.double(), target)
    eager = results(model, x, target)
    mine = results(fusewright.optimize(model, (x.clone().requires_grad_(), target)), x, target)
    for wanted, theirs, found in zip(exact, eager, mine, strict=True):
        most = 2 * (theirs - wanted).norm() + 2e-7 * wanted.norm()
        assert (found - wanted).norm() <= most
    assert not any("nll" in op for op in pytorch_operators(model, x.requires_grad_(), target))


def test_a_class_out_of_range() -> None:
    """A device assertion fails, as with PyTorch, and ends the process's CUDA work."""
    text = """
import torch, fusewright
import torch.nn.functional as F
from tests.support.models import Lambda
x, t = torch.randn(8, 5, device="cuda"), torch.randint(5, (8,), device="cuda")
model = fusewright.optimize(Lambda(lambda x, t: F.cross_entropy(x, t)), (x, t))
model(x, t).item()
print("good", flush=True)
t[2] = 5
model(x, t).item()
print("missed", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == "good\n", done.stdout + done.stderr
    assert "device-side assert" in done.stderr
