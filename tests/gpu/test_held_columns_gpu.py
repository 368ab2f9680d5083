"""Softmax and norms over the channels of images on a GPU, forward and gradients."""

from __future__ import annotations

import pytest
import torch

import fusewright
from benchmarks.loop_kernels import channel_softmax_gradient
from fusewright.ir.graph import Dim
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support.emulated_modules import as_exact_as_eager, trained
from tests.support.loop_runs import run
from tests.support.models import OverChannels
from tests.support.tensors import unaligned

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(5, 64, 4096), (3, 17, 4099), (2, 300, 2052)])
def test_gradients_of_planes_in_channels_last(dtype: str, shape: tuple[int, int, int]) -> None:
    """Results go through shared memory. 300 channels take more than a block has by default."""
    torch.manual_seed(0)
    batch, channels, area = shape
    kind = getattr(torch, dtype)
    loop = channel_softmax_gradient(Dim(1, ("s0",)), channels, area, dtype)
    picked = choose(loop, Target.cuda(), {"s0": batch})
    assert picked.kind == "transpose_column"
    g, f, x = (torch.randn(shape, device="cuda").to(kind) for _ in range(3))
    y = x.softmax(1)
    given = g.double() * f.double()
    exact = y.double() * (given - (given * y.double()).sum(1, keepdim=True))
    for each in (g, unaligned(g)):  # vectors, and single elements
        dx = torch.full((batch, area, channels), 9.0, dtype=kind, device="cuda").transpose(1, 2)
        tensors = {"g": each, "f": f, "y": y, "dx": dx}
        run(loop, tensors, {"s0": batch}, Target.cuda(), picked, threads=0)
        off = float((dx.double() - exact).norm() / exact.norm())
        assert off <= {"float32": 1e-6, "bfloat16": 5e-3, "float16": 1e-3}[dtype]
