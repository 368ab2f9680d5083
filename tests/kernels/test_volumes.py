"""Convolutions over three axes, run without a GPU: taps with different z are separate phases.

The entries are those of test_convolution.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ir.convolution import by_eight
from tests.support.convolution_entry_on_host import WAYS, Transposed, convolved
from tests.support.weight_gradient_on_host import Gradient
from tests.support.weight_gradient_on_host import check as check_gradient

# Images, weights with the in channels of a group, stride, padding, dilation, groups.
VOLUMES = {
    "3x3x3": ((2, 20, 5, 9, 8), (10, 20, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    "without padding": ((3, 8, 6, 7, 7), (24, 8, 3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    "many channels": ((1, 70, 4, 6, 7), (130, 70, 3, 2, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1), 1),
    "1x1x1": ((2, 20, 3, 5, 9), (40, 20, 1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    "stride 2": ((2, 16, 7, 8, 9), (20, 16, 3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 1),
    "stride of z": ((2, 16, 9, 6, 7), (20, 16, 4, 3, 3), (3, 1, 1), (2, 1, 1), (1, 1, 1), 1),
    "dilation": ((1, 12, 9, 8, 9), (9, 12, 3, 3, 3), (2, 1, 1), (3, 2, 1), (3, 2, 1), 1),
    "groups": ((2, 40, 4, 6, 5), (24, 20, 2, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 2),
    "z alone": ((2, 16, 12, 4, 4), (12, 16, 5, 1, 1), (1, 1, 1), (2, 0, 0), (1, 1, 1), 1),
    "wide padding": ((2, 8, 2, 5, 4), (6, 8, 3, 3, 3), (1, 1, 1), (3, 1, 2), (1, 1, 1), 1),
    "one voxel": ((3, 8, 1, 1, 1), (6, 8, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
}

Three = tuple[int, int, int]


def along(
    stride: Three, padding: Three, more: Three = (0, 0, 0), dilation: Three = (1, 1, 1)
) -> Transposed:
    return Transposed(stride, padding, more, dilation)


TRANSPOSED = {
    "stride 1": ((2, 12, 4, 6, 7), (12, 10, 3, 3, 3), along((1, 1, 1), (1, 1, 1))),
    "stride 2": (
        (2, 20, 4, 5, 6), (20, 12, 3, 3, 3), along((2, 2, 2), (1, 1, 1), (1, 1, 1))
    ),
    "4x4x4": ((1, 20, 3, 4, 5), (20, 12, 4, 4, 4), along((2, 2, 2), (1, 1, 1))),
    "2x2x2": ((2, 70, 3, 4, 5), (70, 8, 2, 2, 2), along((2, 2, 2), (0, 0, 0))),
    "narrower along z": (
        (2, 16, 4, 5, 6), (16, 7, 1, 3, 3), along((3, 1, 2), (0, 1, 1), (1, 0, 1))
    ),
    "strides differ": (
        (2, 16, 5, 4, 6), (16, 6, 4, 3, 2), along((3, 1, 1), (2, 0, 1), (1, 0, 0))
    ),
    "dilation": (
        (1, 16, 4, 5, 5), (16, 5, 3, 3, 3), along((2, 1, 1), (2, 1, 2), (1, 0, 0), (3, 1, 2))
    ),
    "groups": ((2, 40, 3, 4, 5), (40, 9, 3, 3, 3), replace(along((1, 1, 1), (1, 1, 1)), groups=2)),
}  # fmt: skip


def close(y: Tensor, exact: Tensor, terms: int) -> bool:
    wrong, right = (each.transpose(0, 1).flatten(1).norm(dim=1) for each in (y - exact, exact))
    return float((wrong / right).max()) < (4e-7 if terms == 3 else 8e-4)


@pytest.mark.parametrize("name", VOLUMES)
@pytest.mark.parametrize(
    ("terms", "way"), [*WAYS, *((terms, f"by eight {way}") for terms, way in WAYS)]
)
def test_every_kind_of_volume(name: str, terms: int, way: str) -> None:
    torch.manual_seed(len(name))
    shape, filter_, *numbers, groups = VOLUMES[name]
    x, w = torch.randn(shape), torch.randn(filter_)
    w *= torch.exp2(torch.randint(-30, 30, (filter_[0], 1, 1, 1, 1)).float())
    exact = F.conv3d(x.double(), w.double(), None, *numbers, groups)
    assert close(convolved(x, w, *numbers, groups, terms, way), exact, terms)


def transposed_ways(name: str) -> list[tuple[int, str]]:
    images, filter_, of = TRANSPOSED[name]
    whole = of.geometry(torch.empty(images), torch.empty(filter_))
    kinds = {"": whole} if by_eight(whole) == whole else {"": whole, "by eight ": by_eight(whole)}
    return [
        (terms, eight + way)
        for eight, each in kinds.items()
        for terms, way in WAYS
        if (way != "staged" or all(each.residue_classes)) and len(each.phases) <= 16
    ]


@pytest.mark.parametrize(
    ("name", "terms", "way"), [(name, *way) for name in TRANSPOSED for way in transposed_ways(name)]
)
def test_every_kind_of_transposed_volume(name: str, terms: int, way: str) -> None:
    torch.manual_seed(len(name))
    images, filter_, of = TRANSPOSED[name]
    x, w = torch.randn(images), torch.randn(filter_)
    w *= torch.exp2(torch.randint(-30, 30, (1, w.shape[1], 1, 1, 1)).float())
    assert close(of.run(x, w, terms, way), of.exact(x, w), terms)


@pytest.mark.parametrize(("terms", "way"), WAYS)
def test_volumes_of_any_layout(terms: int, way: str) -> None:
    torch.manual_seed(3)
    x, w = torch.randn(2, 20, 4, 6, 5), torch.randn(12, 20, 3, 3, 2)
    exact = F.conv3d(x.double(), w.double(), None, 1, 1)
    numbers = ((1, 1, 1), (1, 1, 1), (1, 1, 1), 1)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    turned = w.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
    assert close(convolved(last, turned, *numbers, terms, way), exact, terms)
    sliced = torch.full((2, 24, 5, 7, 12), math.nan)[:, 2:-2, 1:, :-1, 1:-1:2].copy_(x)
    assert close(convolved(sliced, w, *numbers, terms, way), exact, terms)


@pytest.mark.parametrize(("terms", "way"), WAYS)
def test_volumes_with_infinity_and_nan(terms: int, way: str) -> None:
    torch.manual_seed(4)
    x, w = torch.randn(2, 12, 5, 6, 5), torch.randn(10, 12, 3, 3, 3)
    x[0, 3, 2, 4, 4], x[1, 1, 0, 0, -1], x[1, 2, -1, -1, 0] = math.inf, -math.inf, math.nan
    exact = F.conv3d(x.double(), w.double(), None, 1, 1).float()
    y = convolved(x, w, (1, 1, 1), (1, 1, 1), (1, 1, 1), 1, terms, way)
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
    assert torch.equal(y[y.isinf()], exact[exact.isinf()])


@pytest.mark.sample(3)
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("name", [name for name in VOLUMES if name != "one voxel"])
def test_weight_gradients_of_volumes(name: str, terms: int) -> None:
    torch.manual_seed(len(name))
    shape, filter_, stride, padding, dilation, groups = VOLUMES[name]
    gradient = Gradient(stride, padding, dilation, groups, terms)
    dy = torch.randn(gradient.dy_shape(shape, filter_))
    check_gradient(gradient, torch.randn(shape), dy, filter_)
    check_gradient(replace(gradient, parts=5), torch.randn(shape), dy, filter_)
