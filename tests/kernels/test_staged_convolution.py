"""The convolution kernel that reads staged input, run by tests/support/convolution_on_host.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusewright.ir.convolution import Geometry
from fusewright.ir.graph import Dim
from tests.support.convolution_entry_on_host import axis_of, run
from tests.support.convolution_on_host import CONVOLUTIONS, SAME, ConvCase, check
from tests.support.tensors import error

KINDS = (256, 128)
STAGED = {  # by how many out channels: one, two, three and five parts of a tile
    **CONVOLUTIONS,
    "3x3, one part": ((2, 64, 16, 16), (64, 64, 3, 3), SAME),
    "3x3, two parts": ((2, 40, 12, 20), (128, 40, 3, 3), SAME),
    "three parts": ((3, 7, 20, 9), (130, 7, 3, 3), SAME),
    "five parts, one tap": ((5, 64, 10, 12), (290, 64, 1, 1), ConvCase()),
    "parts of groups": ((2, 40, 8, 9), (180, 20, 3, 3), replace(SAME, groups=2)),
    "wide": ((1, 16, 5, 120), (70, 16, 3, 3), SAME),
    "three blocks of channels": ((3, 140, 14, 14), (150, 140, 3, 3), SAME),
    "many images in a tile": ((9, 70, 3, 3), (65, 70, 3, 3), SAME),
}


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_kind_of_convolution(name: str, kind: int, layout: torch.memory_format) -> None:
    torch.manual_seed(len(name))
    images, kernel, case = STAGED[name]
    vectors = layout == torch.channels_last
    shares = not vectors and case.band_width is None
    case = replace(case, staged=kind, vectors=vectors, rounds_rows=vectors, shares=shares)
    check(case, torch.randn(images).contiguous(memory_format=layout), torch.randn(kernel))


@pytest.mark.parametrize("kind", KINDS)
def test_scales_jump_between_images(kind: int) -> None:
    """Values beyond the scale's range, values lost in it, and all zeros. Infinity and NaN are where
    they belong."""
    torch.manual_seed(0)
    case = replace(SAME, staged=kind, shares=True)
    powers = torch.tensor([0.0, 12.0, -40.0, 90.0, 0.0]).view(5, 1, 1, 1)
    x, w = torch.randn(5, 72, 9, 8) * torch.exp2(powers), torch.randn(70, 72, 3, 3)
    x[4] = 0
    y, exact = case.run(x, w), case.exact(x, w)
    assert y[4].eq(0).all()
    for image in range(4):
        assert error(y[image], exact[image]) < 6e-4
    x[0, 3, 4, 4], x[1, 40, 0, 7], x[2, 2, 7, 0] = math.inf, -math.inf, math.nan
    y, exact = replace(case, mends=True).run(x, w), case.exact(x, w).float()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())


@pytest.mark.parametrize("hot", [2.0**20, 1e9, 1e30])
def test_few_far_larger_values_spoil_nothing(hot: float) -> None:
    """They are Inf in fp16, and the sums with them are computed again."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 20, 16, 12), torch.randn(10, 20, 3, 3)
    x[0, 0, 0, 0] = x[1, 7, 5, 5] = hot
    of = Geometry(Dim(2), 1, 20, 10, axis_of(16, 3, 1, 1, 1), axis_of(12, 3, 1, 1, 1))
    y, exact = run(of, x, w, 1, "staged"), SAME.exact(x, w)
    near = (exact.abs() < 1e4).float()
    assert near.mean() > 0.9 and error(y * near, exact * near) < 6e-4
    assert error(y * (1 - near), exact * (1 - near)) < 6e-4


def test_many_values_larger_than_the_sample() -> None:
    """All in one corner of a large image, which is staged again."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 16, 90, 90) * 1e-3, torch.randn(8, 16, 3, 3)
    x[:, :, 40:44, 40:44] = torch.randn(16, 4, 4) * 1e4
    y, exact = replace(SAME, staged=128).run(x, w), SAME.exact(x, w)
    here = (slice(None), slice(None), slice(39, 45), slice(39, 45))
    assert error(y[here], exact[here]) < 6e-4 and error(y, exact) < 6e-4


def test_stages_that_do_not_fit() -> None:
    invalid = 1  # cudaErrorInvalidValue
    x, w = torch.randn(1, 64, 5, 700), torch.randn(70, 64, 3, 3)
    replace(SAME, staged=256).run(x, w, invalid)
