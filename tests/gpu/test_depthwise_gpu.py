"""Depthwise convolutions on a GPU: all passes, against float64 and eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusewright
from fusewright.compile.pipeline import prepare
from fusewright.plan.steps import Call
from tests.support.emulated_modules import trained
from tests.support.gpu import needs_hopper
from tests.support.tensors import error

pytestmark = needs_hopper


LAYERS = {
    "3x3": (nn.Conv2d(96, 96, 3, padding=1, groups=96), (16, 96, 56, 56)),
    "stride 2": (nn.Conv2d(96, 96, 3, stride=2, padding=1, groups=96), (16, 96, 57, 56)),
    "5x5": (nn.Conv2d(240, 240, 5, padding=2, groups=240), (16, 240, 14, 14)),
    "dilation": (nn.Conv2d(64, 64, 3, padding=4, dilation=4, groups=64), (8, 64, 40, 41)),
    "up": (nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1, groups=64), (8, 64, 28, 30)),
    "row": (nn.Conv1d(128, 128, 7, padding=3, groups=128), (16, 128, 1000)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_depthwise_layers_train_as_eager_does(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    model = nn.Sequential(copy.deepcopy(layer), nn.SiLU()).cuda()
    x = torch.randn(shape, device="cuda")
    planned = prepare(model, (x,), modes=("train",), device=x.device).modes[0]
    assert planned.backward is not None
    assert any(step.kind == "weight_gradient" for step in planned.backward.steps)
    assert not any(isinstance(step, Call) for step in planned.backward.steps)
    fast = fusewright.optimize(copy.deepcopy(model), (x,), modes=("train",))
    mine, again, theirs = trained(fast, x), trained(fast, x), trained(model, x)
    truth = trained(copy.deepcopy(model).double(), x.double())
    for ours, same, eager, exact in zip(mine, again, theirs, truth, strict=True):
        assert torch.equal(ours, same), "two runs, two results"
        assert error(ours, exact) <= max(1.5 * error(eager, exact), 6e-7)
