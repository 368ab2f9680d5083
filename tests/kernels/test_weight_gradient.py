"""The weight gradient kernel, run without a GPU by tests/support/weight_gradient_on_host.py.

Every index, swizzle, shift, edge and barrier phase is the kernel's own. nvcc's code, the memory
model and the rounding of tensor cores are not tested here.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.codegen.render import flattened
from fusewright.codegen.source import Source
from tests.support import nvcc
from tests.support.convolution_on_host import rearranged
from tests.support.nvcc import compile_as_emitted
from tests.support.tensors import error
from tests.support.weight_gradient_on_host import Gradient, check, library

# Images, weights with the in channels of a group, and the rest.
SAME = Gradient(padding=(1, 1))
GRADIENTS = {
    "3x3": ((1, 64, 16, 16), (64, 64, 3, 3), SAME),
    "1x1": ((1, 130, 9, 11), (100, 130, 1, 1), Gradient()),
    "1x1, one warpgroup": ((2, 8, 16, 16), (5, 8, 1, 1), Gradient(parts=1)),
    "5x5": ((2, 16, 11, 9), (5, 16, 5, 5), Gradient(padding=(2, 2))),
    "7x7": ((1, 3, 22, 24), (64, 3, 7, 7), Gradient((2, 2), (3, 3))),
    "stride": ((2, 70, 13, 12), (130, 70, 3, 3), Gradient((2, 2), (1, 1))),
    "dilation": ((1, 16, 14, 10), (20, 16, 3, 3), Gradient((1, 1), (2, 2), (2, 2))),
    "stride and dilation": ((1, 33, 19, 17), (8, 33, 3, 3), Gradient((3, 2), (1, 2), (2, 3))),
    "asymmetric": ((2, 20, 12, 15), (7, 20, 3, 5), Gradient((1, 2), (0, 2), (2, 1))),
    "no halo": ((1, 48, 13, 13), (10, 48, 2, 2), Gradient((3, 3))),
    "groups": ((2, 40, 8, 9), (12, 20, 3, 3), replace(SAME, groups=2)),
    "wide groups": ((1, 32, 8, 9), (140, 16, 2, 2), Gradient(groups=2)),
    "many small": ((13, 16, 7, 7), (24, 16, 3, 3), SAME),
    "one pixel": ((5, 8, 1, 1), (6, 8, 3, 3), SAME),
    "bands": ((2, 16, 9, 20), (6, 16, 3, 3), replace(SAME, band_width=8)),
    "long": ((1, 3, 92, 91), (4, 3, 1, 2), Gradient(parts=1)),  # more than kMostSlabs
}


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_kind_of_convolution(name: str, terms: int) -> None:
    torch.manual_seed(len(name))
    images, w, gradient = GRADIENTS[name]
    dy = torch.randn(gradient.dy_shape(images, w))
    check(replace(gradient, terms=terms), torch.randn(images), dy, w)


def operands(x: tuple[int, ...], w: tuple[int, ...], gradient: Gradient) -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(x))
    return torch.randn(x), torch.randn(gradient.dy_shape(x, w))


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize(
    ("layout", "other"),
    [("channels last", "sliced"), ("rows", "channels last"), ("other order", "rows")],
)
@pytest.mark.parametrize("channels", [68, 7])
def test_layouts(channels: int, layout: str, other: str, terms: int) -> None:
    gradient, w = Gradient((1, 2), (1, 1), terms=terms), (12, channels, 3, 2)
    x, dy = operands((2, channels, 9, 10), w, gradient)
    x, dy = rearranged(x, layout), rearranged(dy, other)
    dw = rearranged(torch.empty(w), other)
    assert error(gradient.run(x, dy, dw), gradient.exact(x, dy, w)) < (6e-4 if terms == 1 else 4e-7)


def test_groups_of_channels_last() -> None:
    gradient, w = replace(SAME, groups=3), (24, 8, 3, 3)
    x, dy = (
        each.contiguous(memory_format=torch.channels_last)
        for each in operands((2, 24, 6, 5), w, gradient)
    )
    check(gradient, x, dy, w)


@pytest.mark.parametrize("terms", [1, 3])
def test_any_number_of_parts(terms: int) -> None:
    """The same bits each time. There may be more parts than slabs of positions."""
    w = (5, 4, 3, 3)
    x, dy = operands((3, 4, 10, 9), w, SAME)
    for parts in (1, 3, 17):
        gradient = replace(SAME, parts=parts, terms=terms)
        first, again = (gradient.run(x, dy, torch.empty(w)) for _ in range(2))
        assert torch.equal(first, again)
        assert error(first, gradient.exact(x, dy, w)) < (6e-4 if terms == 1 else 4e-7)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("powers", [(0, 30), (30, 0), (-60, 40), (-110, 10)])
def test_scales_that_change(powers: tuple[int, int], terms: int) -> None:
    """From one image to the next but one, of x, of dy, and of both against each other.

    A slab has one scale for each operand. The zeros between keep it from holding rows of both.
    """
    w, gradient = (3, 4, 3, 3), replace(SAME, terms=terms, parts=1)
    x, dy = operands((5, 4, 12, 10), w, gradient)
    x[1::2], dy[1::2] = 0, 0
    low, high = powers
    jump = torch.exp2(torch.tensor((low, 0, high, 0, low)).double()).float().view(5, 1, 1, 1)
    check(gradient, x * jump, dy, w)
    check(gradient, x, dy * jump, w)
    check(gradient, x * jump, dy / jump, w)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("power", [12, -12])
def test_scales_that_change_among_the_rows_of_a_tap(power: int, terms: int) -> None:
    """Rows that a slab shares with the one before take its scale."""
    w, gradient = (3, 4, 3, 3), replace(SAME, terms=terms, parts=1)
    x, dy = operands((4, 4, 12, 10), w, gradient)
    jump = torch.tensor((1, 2.0**power, 1, 2.0**power)).view(4, 1, 1, 1)
    check(gradient, x * jump, dy / jump, w)
    check(gradient, x / jump, dy * jump, w)


@pytest.mark.parametrize("terms", [1, 3])
def test_operands_of_zeros(terms: int) -> None:
    w, gradient = (3, 4, 3, 3), replace(SAME, terms=terms)
    x, dy = operands((2, 4, 12, 10), w, gradient)
    assert not gradient.run(x * 0, dy, torch.empty(w)).any()
    assert not gradient.run(x, dy * 0, torch.empty(w)).any()
    x[0], dy[1] = 0, 0
    assert not gradient.run(x, dy, torch.empty(w)).any()
    dy[0], dy[1, 1, 3, 3] = 0, 1e-40
    wrong = gradient.run(x, dy, torch.empty(w)) - gradient.exact(x, dy, w)
    assert float(wrong.abs().max()) < 1e-43


def unfolded(gradient: Gradient, x: Tensor, dy: Tensor, w: tuple[int, ...]) -> Tensor:
    """The gradient by its definition: outside of x it is zero, also where dy is Inf."""
    settings = (gradient.dilation, gradient.padding, gradient.stride)
    columns = F.unfold(x.double(), w[2:], *settings)
    return torch.einsum("nol,nkl->ok", dy.double().flatten(2), columns).view(w)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("huge", [False, True])
def test_infinity_and_nan_are_where_they_belong(huge: bool, terms: int) -> None:
    w, gradient = (6, 5, 3, 3), Gradient((2, 1), (1, 1), terms=terms, mends=True)
    x, dy = operands((2, 5, 9, 36), w, gradient)
    most = 3e38 if huge else math.inf
    x[0, 3, 4, 4], dy[1, 4, 2, 35] = most, -most
    if huge:
        x[0, 3, 0, 4], dy[0] = most, 1.5
    else:
        x[1, 2, 7, 0], dy[0, 2, 0, 0] = math.nan, math.inf
    found = gradient.run(x, dy, torch.empty(w))
    exact = unfolded(gradient, x, dy, w).float()
    assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
    assert torch.equal(found[found.isinf()], exact[exact.isinf()])
    assert not found.isfinite().all() and found.isfinite().any()


def test_one_term_is_as_exact_as_fp16() -> None:
    w = (8, 8, 3, 3)
    x, dy = operands((1, 8, 12, 12), w, SAME)
    found = error(SAME.run(x, dy, torch.empty(w)), SAME.exact(x, dy, w))
    assert 5e-5 < found < 6e-4


@pytest.mark.parametrize("images", [0, 1])
def test_empty_gradients(images: int) -> None:
    """Without positions a gradient is zero; without channels it is empty."""
    x, dy = torch.randn(images, 3, 4, 4), torch.randn(images, 2, 4, 4)
    if images == 0:
        assert not SAME.run(x, dy, torch.empty(2, 3, 3, 3)).any()
    else:
        assert SAME.run(x[:, :0], dy, torch.empty(2, 0, 3, 3)).numel() == 0


def test_parts_keep_all_processors_busy() -> None:
    def parts(x: tuple[int, ...], w: tuple[int, ...], of: Gradient = SAME) -> int:
        sizes = of.sizes(torch.empty(x), torch.empty(of.dy_shape(x, w)), (w[2], w[3]))
        return library().parts_of(ctypes.byref(sizes), of.terms, 132)

    # Units of work: 64 out channels by 64 in channels, nine taps together.
    assert parts((16, 64, 128, 128), (128, 64, 3, 3)) == 66  # 2 units
    assert parts((16, 704, 28, 28), (512, 704, 3, 3)) == 3  # 88 units: 3 parts fill two waves
    assert parts((16, 2048, 7, 7), (2048, 2048, 3, 3)) == 1  # 1024 units
    assert parts((1, 64, 4, 4), (64, 64, 3, 3)) == 1  # one slab


@nvcc.needed
def test_the_kernel_compiles(tmp_path: Path) -> None:
    header = "\n".join(flattened("sm90/gradient/sm90_weight_gradient.cuh", set()))
    made = "template int fw::weight_gradient<{}>(const fw::ConvInput&, const fw::ConvInput&,"
    made += " const fw::WeightGradient&, const fw::ConvolutionSizes&, int, void*, int, void*);"
    text = "\n".join([header, made.format(1), made.format(3)])
    compile_as_emitted(Source("cuda", text, ()), tmp_path)
