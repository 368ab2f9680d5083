"""Softmax and norms over the channels of images on a GPU, forward and gradients."""

from __future__ import annotations

import pytest
import torch

import fusewright
from tests.support.emulated_modules import as_exact_as_eager, trained
from tests.support.models import OverChannels

SHAPES = [
    ((40, 64, 17), (8, 64, 56, 56)),
    ((40, 64, 17), (3, 64, 41, 61)),
    ((512, 300, 129), (2, 512, 72, 72)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "shape"), SHAPES)
def test_reductions_over_channels_are_as_exact_as_eager(
    channels: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = OverChannels(*channels).to("cuda", dtype)
    x = torch.randn(shape, device="cuda").to(dtype)
    fast = fusewright.optimize(model, x, modes=("train",))
    as_exact_as_eager(fast, model, x, 2e-6 if dtype == torch.float32 else 2e-2)
    for once, again in zip(trained(fast, x), trained(fast, x), strict=True):
        assert torch.equal(once, again)
