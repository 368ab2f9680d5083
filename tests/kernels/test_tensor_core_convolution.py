"""The tensor-core convolution kernel, run by tests/support/convolution_on_host.py."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import replace

import pytest
import torch

from tests.support.convolution_on_host import (
    CONVOLUTIONS,
    SAME,
    ConvCase,
    check,
    library,
    rearranged,
)
from tests.support.tensors import error


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize(("terms", "tile"), [(1, 64), (1, 128), (3, 64), (3, 128)])
def test_every_kind_of_convolution(name: str, terms: int, tile: int, vectors: bool) -> None:
    torch.manual_seed(len(name))
    images, kernel, case = CONVOLUTIONS[name]
    case = replace(case, terms=terms, tile=tile, vectors=vectors, rounds_rows=vectors)
    check(case, torch.randn(images), torch.randn(kernel))


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("layout", ["channels last", "rows", "sliced", "other order"])
@pytest.mark.parametrize("channels", [68, 36, 7])
def test_layouts(layout: str, channels: int, terms: int) -> None:
    torch.manual_seed(channels)
    x, w = rearranged(torch.randn(2, channels, 9, 10), layout), torch.randn(8, channels, 3, 2)
    check(
        ConvCase((1, 2), (1, 1), terms=terms),
        x,
        w.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    )


@pytest.mark.parametrize("terms", [1, 3])
def test_groups_of_channels_last(terms: int) -> None:
    x = torch.randn(2, 24, 6, 5).contiguous(memory_format=torch.channels_last)
    check(replace(SAME, groups=3, terms=terms), x, torch.randn(9, 8, 3, 3))


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize(("width", "band_width"), [(16, None), (20, 8), (4, None)])
def test_rows_rounded_up_to_four(width: int, band_width: int | None, tile: int, terms: int) -> None:
    case = replace(SAME, rounds_rows=True, band_width=band_width, tile=tile, terms=terms)
    check(case, torch.randn(3, 16, 8, width), torch.randn(37, 16, 3, 3))


@pytest.mark.parametrize("terms", [1, 3])
def test_one_stage_is_enough(terms: int) -> None:
    """Where only one fits, converting and multiplying alternate."""
    case = ConvCase((1, 1), (2, 2), (2, 2), terms=terms)
    x, w = torch.randn(1, 70, 7, 130 if terms == 1 else 60), torch.randn(4, 70, 3, 3)
    assert 2 * case.shape(x, w).stage_rows * 128 * (1 if terms == 1 else 2) > 180 * 1024
    check(case, x, w)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("powers", [(0, 30), (30, 0), (0, -30), (-60, 40), (-100, 20), (120, 90)])
def test_scales_that_change(powers: tuple[int, int], terms: int) -> None:
    """From one block of channels to the next and from one image to the next."""
    torch.manual_seed(0)
    # The input's scale is undone before the weights': sums of 2^120 are too large in between.
    case = replace(SAME, terms=terms, mends=max(powers) > 100)
    jump = torch.tensor(powers).double()
    x, w = torch.rand(1, 128, 8, 9) + 0.5, torch.randn(8, 128, 3, 3) * 2.0**-10
    by_channels = x * torch.exp2(jump).float().repeat_interleave(64).view(1, 128, 1, 1)
    check(case, by_channels, w)
    by_images = torch.randn(2, 8, 18, 15) * torch.exp2(jump).float().view(2, 1, 1, 1)
    y, exact = case.run(by_images, w[:, :8]), case.exact(by_images, w[:, :8])
    # A tile that holds rows of both, as the second does, has the larger one's scale.
    for image, rows in ((0, slice(0, 7)), (1, slice(11, 18))):
        assert error(y[image, :, rows], exact[image, :, rows]) < (6e-4 if terms == 1 else 4e-7)


@pytest.mark.parametrize("powers", [(-64, -62), (-58, -64), (-100, -20), (60, -100)])
@pytest.mark.parametrize("terms", [1, 3])
def test_small_operands_do_not_vanish(powers: tuple[int, int], terms: int) -> None:
    """The product of both inverse scales is too small for a float."""
    torch.manual_seed(0)
    x = (torch.rand(1, 64, 8, 8) + 0.5) * 2.0 ** powers[0]
    w = (torch.rand(8, 64, 3, 3) + 0.5) * 2.0 ** powers[1]
    check(replace(SAME, terms=terms), x, w)


@pytest.mark.parametrize(  # one ring of rows to four
    ("channels", "layout", "terms", "tile"),
    [
        (24, torch.contiguous_format, 1, 64),
        (24, torch.contiguous_format, 1, 128),
        (64, torch.channels_last, 1, 128),
        (40, torch.channels_last, 3, 64),
        (100, torch.channels_last, 1, 64),
        (130, torch.contiguous_format, 3, 64),
        (250, torch.contiguous_format, 1, 64),
    ],
)
def test_blocks_walk_from_tile_to_tile(
    channels: int, layout: torch.memory_format, terms: int, tile: int
) -> None:
    """Two groups with two tiles of out channels each. Scales change on the way."""
    torch.manual_seed(0)
    case = replace(SAME, groups=2, tile=tile, terms=terms)
    x, w = torch.randn(3, 2 * channels, 20, 18), torch.randn(2 * tile + 4, channels, 3, 3)
    x = (x * torch.exp2(torch.tensor([0.0, 12.0, -20.0])).view(3, 1, 1, 1)).contiguous(
        memory_format=layout
    )
    y, exact = case.run(x, w), case.exact(x, w)
    # Tiles that hold rows of two images have the larger one's scale.
    for image, rows in ((0, slice(0, 4)), (1, slice(None)), (2, slice(16, 20))):
        of_image = error(y[image, :, rows], exact[image, :, rows])
        assert of_image < (6e-4 if terms == 1 else 1e-6)


@pytest.mark.parametrize("terms", [1, 3])
def test_operands_of_zeros(terms: int) -> None:
    case = replace(SAME, terms=terms)
    x, w = torch.zeros(1, 70, 8, 9), torch.randn(8, 70, 3, 3)
    assert not case.run(x, w).any() and not case.run(torch.randn_like(x), w * 0).any()
    x[0, 66, 3, 3] = 1e-40
    y, exact = case.run(x, w), case.exact(x, w)
    assert float((y - exact).abs().max()) < 1e-43


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("huge", [False, True])
def test_infinity_and_nan_are_where_they_belong(huge: bool, terms: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 70, 8, 8), torch.randn(6, 70, 3, 3)
    most = 3e38 if huge else math.inf
    x[0, 3, 4, 4], x[1, 67, 0, 7] = most, -most
    if not huge:
        x[1, 2, 7, 0], w[2, 5, 1, 1], w[3, 68, 0, 0] = math.nan, math.inf, -math.inf
    w = w.contiguous(memory_format=torch.channels_last)  # read again where the sum is not finite
    case = replace(SAME, terms=terms, mends=True)
    y, exact = case.run(x, w), case.exact(x, w).float()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
    assert torch.equal(y[y.isinf()], exact[exact.isinf()])


def test_one_term_is_as_exact_as_fp16() -> None:
    x, w = torch.randn(1, 64, 8, 8), torch.randn(8, 64, 3, 3)
    assert 5e-5 < error(SAME.run(x, w), SAME.exact(x, w)) < 6e-4


def test_a_batch_of_no_images() -> None:
    assert SAME.run(torch.randn(0, 8, 4, 4), torch.randn(3, 8, 3, 3)).shape == (0, 3, 4, 4)


def test_division_by_multiplication() -> None:
    divide = library().quotient_and_rest
    divide.restype = ctypes.c_int64
    draw = random.Random(0)
    edges = [1, 2, 3, 7, 8, 132, 17160, 2**16 - 1, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1]
    for by in [*edges, *(draw.randrange(1, 2 ** draw.randrange(1, 32)) for _ in range(200))]:
        near = [k * by + d for k in (0, 1, 2**31 // by - 1, 2**31 // by) for d in (-1, 0, 1)]
        for x in [*near, 2**31 - 1, draw.randrange(2**31)]:
            if 0 <= x < 2**31:
                assert divmod(divide(x, by), 2**32) == divmod(x, by)
