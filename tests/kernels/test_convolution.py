"""The entry of tensor-core convolutions, run without a GPU: it splits weights and arranges taps.

test_tensor_core_convolution.py tests the kernel itself, with weights and taps arranged by Python.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ir.convolution import by_eight
from tests.support.convolution_entry_on_host import WAYS, Transposed, convolved


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("terms", "way"), [*WAYS, *((terms, f"by eight {way}") for terms, way in WAYS)]
)
@pytest.mark.parametrize(
    ("shape", "filter_", "stride", "padding", "dilation", "groups"),
    [
        ((3, 12, 9, 12), (32, 12, 3, 3), (1, 1), (1, 1), (1, 1), 1),
        ((2, 20, 7, 7), (34, 10, 3, 3), (1, 1), (1, 1), (1, 1), 2),
        ((2, 5, 9, 11), (6, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1),
        ((5, 140, 7, 7), (20, 140, 3, 3), (1, 1), (1, 1), (1, 1), 1),
        ((3, 8, 7, 8), (6, 8, 4, 4), (1, 1), (3, 2), (1, 1), 1),
        ((1, 70, 8, 8), (10, 70, 3, 2), (2, 1), (0, 1), (1, 2), 1),
        ((2, 6, 12, 13), (8, 3, 5, 4), (3, 2), (2, 2), (1, 1), 2),
        ((1, 3, 16, 16), (70, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    ],
)
def test_every_arrangement_of_weights_and_taps(  # type: ignore[no-untyped-def]
    shape, filter_, stride, padding, dilation, groups, terms: int, way: str
) -> None:
    torch.manual_seed(sum(shape))
    x, w = torch.randn(shape), torch.randn(filter_)
    w *= torch.exp2(torch.randint(-30, 30, (filter_[0], 1, 1, 1)).float())
    exact = F.conv2d(x.double(), w.double(), None, stride, padding, dilation, groups)
    y = convolved(x, w, stride, padding, dilation, groups, terms, way)
    wrong, right = (each.transpose(0, 1).flatten(1).norm(dim=1) for each in (y - exact, exact))
    assert float((wrong / right).max()) < (4e-7 if terms == 3 else 8e-4)


@pytest.mark.parametrize("kind", ["staged", "3_64"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "filter_", "stride", "padding", "groups"),
    [
        ((3, 12, 9, 12), (32, 12, 3, 3), (1, 1), (1, 1), 1),
        ((2, 140, 7, 7), (20, 140, 3, 3), (1, 1), (1, 1), 1),
        ((2, 72, 8, 9), (10, 72, 3, 2), (2, 1), (0, 1), 1),
        ((2, 144, 6, 7), (16, 72, 3, 3), (1, 1), (1, 1), 2),
        ((3, 16, 5, 4, 6), (9, 16, 2, 3, 3), (1, 1, 1), (0, 1, 1), 1),
    ],
)
def test_a_computed_input(  # type: ignore[no-untyped-def]
    shape, filter_, stride, padding, groups, last: bool, kind: str
) -> None:
    """By channels, by rows, outside the image, in the sample, and where sums are repeated."""
    torch.manual_seed(sum(shape))
    x, w = torch.randn(shape), torch.randn(filter_)
    x[-1] *= 2.0**40 if kind == "staged" else 2.0**6  # this image is staged again
    x[0, 0, 1, 1] = 3e38  # and this value is not finite, twice
    if last:
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    terms = 1 if kind == "staged" else 3
    ones = (1,) * len(stride)
    y = convolved(x, w, stride, padding, ones, groups, terms, f"computed_{kind}")
    convolve = F.conv3d if len(stride) == 3 else F.conv2d
    exact = convolve(2 * x, w, None, stride, padding, ones, groups)
    assert torch.equal(y.isfinite(), exact.isfinite())
    assert not exact.isfinite().all()
    wide = convolve(2 * x[1:].double(), w.double(), None, stride, padding, ones, groups)
    wrong, right = (each.flatten(1).norm(dim=1) for each in (y[1:] - wide, wide))
    assert float((wrong / right).max()) < (4e-7 if terms == 3 else 8e-4)


# Transposed -------------------------------------------------------------------------------------


# Images, weights with the out channels of a group, and the rest.
TRANSPOSED = {
    "stride 1": ((2, 6, 7, 9), (6, 5, 3, 2), Transposed(padding=(0, 1))),
    "stride 2": ((2, 70, 7, 8), (70, 10, 3, 3), Transposed((2, 2), (1, 1), (1, 1))),
    "4x4": ((1, 20, 8, 8), (20, 70, 4, 4), Transposed((2, 2), (1, 1))),
    "as wide as its strides": ((2, 16, 5, 6), (16, 7, 2, 3), Transposed((2, 3))),
    "narrower": ((2, 33, 6, 5), (33, 8, 1, 1), Transposed((2, 3), (0, 0), (1, 2))),
    "narrower, by one axis": ((1, 8, 6, 5), (8, 3, 1, 5), Transposed((3, 2), (0, 2))),
    "strides differ": ((2, 12, 5, 9), (12, 6, 5, 4), Transposed((3, 1), (2, 2), (1, 0))),
    "strides have no common divisor": (
        (1, 8, 9, 5), (8, 4, 4, 3), Transposed((2, 3), (3, 1), (0, 2))
    ),
    "dilation": ((1, 16, 6, 7), (16, 5, 3, 3), Transposed((2, 2), (2, 1), (0, 1), (2, 3))),
    "dilation and more": (
        (1, 5, 5, 6), (5, 4, 3, 4), Transposed((3, 2), (3, 4), (2, 3), (3, 4))
    ),
    "groups": ((2, 40, 5, 6), (40, 9, 3, 3), Transposed((2, 1), (1, 1), groups=2)),
    "wide padding": ((2, 8, 9, 8), (8, 5, 2, 3), Transposed((2, 1), (5, 3), (1, 0))),
    "one pixel": ((3, 8, 1, 1), (8, 6, 4, 3), Transposed((2, 2))),
    "line": ((3, 24, 1, 37), (24, 6, 1, 5), Transposed((1, 3), (0, 2), (0, 1))),
    "many channels": ((1, 150, 5, 5), (150, 140, 3, 3), Transposed((2, 2), (1, 1))),
    "many tiles": ((3, 8, 14, 15), (8, 4, 3, 3), Transposed((2, 2), (1, 1), (1, 0))),
    "strides of 1 and 2": ((2, 20, 6, 9), (20, 70, 3, 4), Transposed((1, 2), (1, 1))),
    "odd padding": ((2, 24, 5, 12), (24, 9, 2, 5), Transposed((2, 2), (1, 3), (1, 1))),
    "one tap": ((2, 16, 6, 7), (16, 12, 1, 1), Transposed((2, 2), (0, 0), (1, 1))),
    "groups of a stride": ((2, 40, 5, 6), (40, 12, 3, 3), Transposed((2, 2), (1, 1), groups=2)),
    "several tiles of channels": ((1, 70, 6, 8), (70, 100, 2, 2), Transposed((2, 2))),
}  # fmt: skip


def transposed_operands(name: str) -> tuple[Tensor, Tensor, Transposed]:
    torch.manual_seed(len(name))
    images, filter_, of = TRANSPOSED[name]
    return torch.randn(images), torch.randn(filter_), of


def ways_of(name: str) -> list[tuple[int, str]]:
    """The methods for this case. A residue class without taps has no staged input."""
    x, w, of = transposed_operands(name)
    whole = of.geometry(x, w)
    kinds = {"": whole} if by_eight(whole) == whole else {"": whole, "by eight ": by_eight(whole)}
    return [
        (terms, eight + way)
        for eight, each in kinds.items()
        for terms, way in WAYS
        if way != "staged" or all(each.residue_classes)
    ]


@pytest.mark.parametrize(
    ("name", "terms", "way"),
    [(name, *way) for name in TRANSPOSED for way in ways_of(name)]
    + [("strides of 1 and 2", 1, "by eight ping_pong")],
)
def test_every_kind_of_transposed_convolution(name: str, terms: int, way: str) -> None:
    x, w, of = transposed_operands(name)
    w *= torch.exp2(torch.randint(-30, 30, (1, w.shape[1], 1, 1)).float())
    y, exact = of.run(x, w, terms, way), of.exact(x, w)
    wrong, right = (each.transpose(0, 1).flatten(1).norm(dim=1) for each in (y - exact, exact))
    assert float((wrong / right).max()) < (4e-7 if terms == 3 else 8e-4)


def test_layouts_of_transposed_convolutions() -> None:
    x, w, of = transposed_operands("groups")
    x = x.contiguous(memory_format=torch.channels_last)
    w = w.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert float((of.run(x, w, 3) - of.exact(x, w)).norm() / of.exact(x, w).norm()) < 4e-7


@pytest.mark.parametrize(
    ("name", "terms", "way"),
    [
        (name, *way)
        for name in ("stride 1", "stride 2", "strides differ", "groups", "narrower", "many tiles")
        for way in ways_of(name)
    ],
)
def test_infinity_and_nan_in_a_transposed_convolution(name: str, terms: int, way: str) -> None:
    """By its definition: no zeros at the edges meet an infinite weight."""
    x, w, of = transposed_operands(name)
    x[0, 3, 4, 4], x[1, 1, 0, -1], x[1, 2, -1, 0] = math.inf, -math.inf, math.nan
    w[2, 1, 0, 0], w[4, 2, -1, -1], w[-1, 0, 0, -1] = math.inf, -math.inf, 3e38
    y, exact = of.run(x, w, terms, way), of.exact(x, w).float()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
    assert torch.equal(y[y.isinf()], exact[exact.isinf()])
    assert y.isfinite().any() and not y.isfinite().all()


def test_a_transposed_convolution_of_no_images() -> None:
    x, w, of = transposed_operands("stride 2")
    assert of.run(x[:0], w, 1).shape == (0, 10, 14, 16)


@pytest.mark.parametrize(
    ("size", "kernel", "padding"), [((7, 9), (3, 2), (0, 1)), ((7, 7), (3, 3), (1, 1))]
)
@pytest.mark.parametrize("way", ["tiles", "staged"])
def test_rows_of_a_transposed_convolution_share_their_padding(
    size: tuple[int, int], kernel: tuple[int, int], padding: tuple[int, int], way: str
) -> None:
    """Without strides there is one residue class. Its input may be staged, with several images
    in a tile."""
    torch.manual_seed(sum(kernel))
    x, w, of = torch.randn(5, 70, *size), torch.randn(70, 12, *kernel), Transposed(padding=padding)
    y, exact = of.run(x, w, 1, way), of.exact(x, w)
    assert float((y - exact).norm() / exact.norm()) < 8e-4
