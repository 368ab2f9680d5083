"""The convolution kernel with alternating warpgroups, run by
tests/support/convolution_on_host.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.convolution_on_host import SAME, ConvCase, check
from tests.support.tensors import error

PING_PONG = replace(SAME, ping_pong=True)
IN_PING_PONG = {  # by how many out channels: one, two, three and five parts of a tile
    "3x3, one part": ((2, 64, 16, 16), (64, 64, 3, 3), PING_PONG),
    "3x3, two parts": ((2, 40, 12, 20), (128, 40, 3, 3), PING_PONG),
    "three parts": ((3, 7, 20, 9), (130, 7, 3, 3), PING_PONG),
    "five parts, one tap": ((5, 64, 10, 12), (290, 64, 1, 1), replace(PING_PONG, padding=(0, 0))),
    "groups": ((2, 40, 8, 9), (180, 20, 3, 3), replace(PING_PONG, groups=2)),
    "bands": ((2, 16, 9, 20), (70, 16, 3, 3), replace(PING_PONG, band_width=8)),
    "dilation": (
        (3, 16, 14, 10),
        (100, 16, 3, 3),
        ConvCase((1, 1), (2, 2), (2, 2), ping_pong=True),
    ),
    "two stages": ((1, 16, 5, 250), (70, 16, 3, 3), PING_PONG),
    "one tile": ((1, 16, 3, 3), (128, 16, 3, 3), PING_PONG),
}


@pytest.mark.parametrize("name", IN_PING_PONG)
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_warpgroups_alternate(name: str, vectors: bool, layout: torch.memory_format) -> None:
    torch.manual_seed(len(name))
    images, kernel, case = IN_PING_PONG[name]
    case = replace(case, vectors=vectors, rounds_rows=vectors)
    check(case, torch.randn(images).contiguous(memory_format=layout), torch.randn(kernel))


def test_ping_pong_needs_tiles_of_one_stage() -> None:
    invalid = 1  # cudaErrorInvalidValue
    x, w = torch.randn(1, 64, 5, 400), torch.randn(70, 64, 3, 3)
    PING_PONG.run(x, w, invalid)  # no room for two
    PING_PONG.run(torch.randn(1, 65, 8, 8), torch.randn(70, 65, 3, 3), invalid)
    replace(PING_PONG, stride=(2, 1)).run(x[..., :20], w, invalid)


def test_scales_that_change_between_tiles() -> None:
    """From image to image. Infinity and NaN are where they belong."""
    torch.manual_seed(0)
    powers = torch.tensor([0.0, 12.0, -20.0, 30.0]).view(4, 1, 1, 1)
    x, w = torch.randn(4, 48, 20, 18) * torch.exp2(powers), torch.randn(200, 48, 3, 3)
    y, exact = PING_PONG.run(x, w), PING_PONG.exact(x, w)
    for image, rows in ((0, slice(0, 4)), (1, slice(None)), (2, slice(9, 11)), (3, slice(9, 20))):
        assert error(y[image, :, rows], exact[image, :, rows]) < 6e-4
    x[0, 3, 4, 4], x[1, 40, 0, 7], x[2, 2, 7, 0] = math.inf, -math.inf, math.nan
    y, exact = replace(PING_PONG, mends=True).run(x, w), PING_PONG.exact(x, w).float()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
