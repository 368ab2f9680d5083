"""Max pooling in training on a GPU: offsets and gradients against eager and float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from tests.support.models import Lambda
from tests.support.pooling import (
    as_exact,
    calls_in_training,
    hard_inputs,
    same,
    trained,
    training_plans,
)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(2,), (3, 2, 1), (3, 1, 1), (2, 3)])
@pytest.mark.parametrize("shape", [(3, 16, 56, 64), (2, 5, 13, 17)])
def test_max_pooling(
    shape: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype, last: bool
) -> None:
    model = Lambda(lambda x: F.max_pool2d(torch.relu(x), *size))
    x = torch.randn(shape, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    assert not calls_in_training(training_plans(model, x))
    fast = fusewright.optimize(copy.deepcopy(model), x, modes=("train",))
    alone = len(size) < 3
    for given in (x, torch.cat((x, x)), *hard_inputs(x)[:2]):
        if alone:
            same(fast, model, given)
        else:
            ((_, exact),) = trained(model, given.double(), dtype=dtype)
            as_exact(*trained(fast, given), *trained(model, given), exact)
    (first,), (second,) = trained(fast, x), trained(fast, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if alone:
        low = torch.where(torch.rand_like(x) < 0.9, math.nan, x)
        same(fast, model, low)


def test_a_network_with_pooling_trains() -> None:
    """Convolutions around the pool run in channels-last, and so do its offsets."""
    layers = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 32, 3)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(32, 32, 64, 64, device="cuda")
    fast = fusewright.optimize(copy.deepcopy(model), x, modes=("train",))
    exact = copy.deepcopy(model).double()
    found: list[list[Tensor]] = []
    for each, given in ((fast, x), (model, x), (exact, x.double())):
        ((y, grad),) = trained(each, given, dtype=torch.float32)
        found.append([y, grad, *(p.grad for p in each.parameters() if p.grad is not None)])
    for mine, theirs, right in zip(*found, strict=True):
        errors = [float((one.double() - right).norm() / right.norm()) for one in (mine, theirs)]
        assert errors[0] <= 1.5 * errors[1] + 1e-6
