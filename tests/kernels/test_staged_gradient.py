"""Both gradients of a convolution from one staged gradient of its result, run without a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fusewright.codegen.convolution import staged_workspace
from fusewright.codegen.source import ALIGNMENT
from fusewright.cost.conv_staged import with_shared_staging
from fusewright.ir.convolution import ConvAxis, Geometry, by_eight
from fusewright.ir.graph import Dim
from tests.support.convolution_entry_on_host import BODY as CONVOLUTION_BODY
from tests.support.convolution_entry_on_host import Filter, axis_of, sizes_of
from tests.support.convolution_on_host import Strided, five_strides, rearranged
from tests.support.tensor_cores_on_host import library_of
from tests.support.tensors import error

BODY = (
    CONVOLUTION_BODY[: CONVOLUTION_BODY.index("ENTRY(1_64")]
    + r"""
namespace fw {
using Staged = ByStagedInput<128, 128>;
using FewStaged = ByStagedInput<64, 128, 1>;
using WovenStaged = ByStagedInput<128, 256, 2>;
}
ENTRY(staged, 1, Staged)
ENTRY(few_staged, 1, FewStaged)
ENTRY(woven_staged, 1, WovenStaged)
extern "C" int staged_gradient(const fw::ConvInput* x, const fw::ConvInput* dy,
                             const fw::WeightGradient* dw, const fw::ConvolutionSizes* sizes,
                             const fw::ConvolutionSizes* back, int parts, void* workspace,
                             void* staged_x, void* staged_dy) {
  memset(emulated_shared, 0xff, sizeof(emulated_shared));  /* NaN */
  return fw::staged_gradient(*x, *dy, *dw, *sizes, *back, parts, workspace, staged_x, staged_dy, 0,
                           nullptr);
}
"""
)
UNSEEN = 12345.0


@functools.cache
def library() -> ctypes.CDLL:
    return library_of("sm90/gradient/sm90_staged_weight_gradient.cuh", BODY)


class Guarded:
    """So many bytes, and a guard behind them that must not be written."""

    def __init__(self, count: int) -> None:
        self.memory = torch.full((count + 512,), 0xFF, dtype=torch.uint8)
        self.skip = -self.memory.data_ptr() % 256
        self.count = count

    @property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.memory.data_ptr() + self.skip)

    def floats(self) -> Tensor:
        return self.memory[self.skip : self.skip + self.count].view(torch.float32)

    def check(self) -> None:
        assert (self.memory[self.skip + self.count :] == 0xFF).all()


@dataclass(frozen=True)
class Case:
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    parts: int = 2
    mends: bool = False

    @property
    def axes(self) -> list[ConvAxis]:
        given = zip(self.x[2:], self.w[2:], self.stride, self.dilation, self.padding, strict=True)
        return [axis_of(*each) for each in given]

    @property
    def dy(self) -> tuple[int, ...]:
        return (self.x[0], self.w[0], *(axis.result for axis in self.axes))

    def geometries(self) -> tuple[Geometry, Geometry]:
        """Of the convolution, and of the gradient by its input as it is walked."""
        *deep, y, x = self.axes
        ins, outs = self.x[1] // self.groups, self.w[0] // self.groups
        of = Geometry(Dim(self.x[0]), self.groups, ins, outs, y, x)
        of = replace(of, z=deep[0]) if deep else of
        of, back = with_shared_staging(of, of.input_gradient)
        return of, by_eight(back)

    def run(self, x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients by the input and the weights."""
        of, back = self.geometries()
        dx, dw = torch.full(self.x, UNSEEN), torch.full(self.w, UNSEEN)
        staged_x, staged_dy = (
            Guarded(staged_workspace(each, each.x.positions).at({}) - ALIGNMENT)
            for each in (of, back)
        )
        weights, sums = Guarded(back.workspace_bytes), Guarded(4 * self.parts * of.filter_elements)
        sizes, sizes_back = (sizes_of(each, each.x.positions) for each in (of, back))
        sizes_back.shares_staged = True
        given = Strided(dy.data_ptr(), five_strides(dy))
        first, second, *rest = five_strides(w)
        filter_ = Filter(
            w.data_ptr(), (ctypes.c_int64 * 6)(back.channels * first, second, first, *rest)
        )
        kind = f"{('few', 'woven')[back.row_order.beside - 1]}_" if back.row_order else ""
        entry = getattr(library(), f"convolution_{kind}staged")
        by_reference = (ctypes.byref(each) for each in (given, filter_, sizes_back))
        to = ctypes.c_void_p(dx.data_ptr())
        assert entry(*by_reference, weights.pointer, staged_dy.pointer, to) == 0
        source, gradient = (Strided(each.data_ptr(), five_strides(each)) for each in (x, dw))
        by_reference = (ctypes.byref(each) for each in (source, given, gradient, sizes, sizes_back))
        memory = (each.pointer for each in (sums, staged_x, staged_dy))
        assert library().staged_gradient(*by_reference, self.parts, *memory) == 0
        for each in (staged_x, staged_dy, weights, sums):
            each.check()
        assert not (dx == UNSEEN).any() and not (dw == UNSEEN).any()
        assert self.mends or sums.floats().isfinite().all()
        return dx, dw

    def exact(self, x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        names = f"conv{len(self.stride)}d"
        settings = (self.stride, self.padding, self.dilation, self.groups)
        by_input = getattr(torch.nn.grad, f"{names}_input")
        by_weight = getattr(torch.nn.grad, f"{names}_weight")
        dx = by_input(self.x, w.double(), dy.double(), *settings)
        return dx, by_weight(x.double(), self.w, dy.double(), *settings)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(sum(self.x) + sum(self.w))
        return torch.randn(self.x), torch.randn(self.dy), torch.randn(self.w)

    def check(self, x: Tensor, dy: Tensor, w: Tensor) -> None:
        for found, exact in zip(self.run(x, dy, w), self.exact(x, dy, w), strict=True):
            assert error(found, exact) < 6e-4


CASES = {
    "3x3": Case((2, 64, 16, 16), (64, 64, 3, 3), padding=(1, 1)),
    "3x3, nothing beside": Case((1, 40, 13, 14), (70, 40, 3, 3)),
    "1x1": Case((1, 130, 9, 11), (100, 130, 1, 1)),
    "1x1, padded": Case((2, 16, 6, 7), (40, 16, 1, 1), padding=(1, 2)),
    "one warpgroup": Case((2, 8, 16, 16), (5, 8, 1, 1), parts=1),
    "5x5": Case((2, 16, 11, 9), (5, 16, 5, 5), padding=(2, 2)),
    "stride": Case((2, 70, 13, 12), (130, 70, 3, 3), (2, 2), (1, 1)),
    "dilation": Case((1, 16, 14, 10), (20, 16, 3, 3), (1, 1), (2, 2), (2, 2)),
    "stride and dilation": Case((1, 33, 19, 17), (8, 33, 3, 3), (3, 2), (1, 2), (2, 3)),
    "asymmetric": Case((2, 20, 12, 15), (7, 20, 3, 5), (1, 2), (0, 2), (2, 1)),
    "groups": Case((2, 40, 8, 9), (12, 20, 3, 3), padding=(1, 1), groups=2),
    "many small": Case((13, 16, 7, 7), (24, 16, 3, 3), padding=(1, 1)),
    "one pixel": Case((5, 8, 1, 1), (6, 8, 3, 3), padding=(1, 1)),
    "wide out": Case((3, 64, 10, 9), (200, 64, 2, 2), padding=(1, 0), parts=3),
    "volume": Case((2, 16, 5, 6, 7), (20, 16, 3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3),
    "volume with stride": Case((2, 9, 6, 7, 5), (8, 9, 2, 3, 2), (2, 1, 2), (0, 1, 1), (1,) * 3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_convolution(name: str) -> None:
    case = CASES[name]
    case.check(*case.operands())


@pytest.mark.parametrize("layout", ["channels last", "sliced", "rows"])
def test_layouts(layout: str) -> None:
    case = Case((2, 36, 9, 10), (12, 36, 3, 3), padding=(1, 1))
    x, dy, w = case.operands()
    case.check(rearranged(x, layout), rearranged(dy, layout), w)


@pytest.mark.parametrize("name", ["many small", "3x3", "wide out", "stride"])
def test_scales_jump_between_images(name: str) -> None:
    """Values far below the largest add little. Nothing is lost of those as large."""
    case = CASES[name]
    x, dy, w = case.operands()
    for power in (9.0, -30.0):
        powers = torch.exp2(torch.arange(case.x[0]) % 4 * power).view(-1, 1, 1, 1)
        case.check(x * powers, dy / powers, w)  # each image adds as much
        case.check(x * powers, dy, w)
    dy[0] = 0
    case.check(x, dy, w)


def test_a_value_larger_than_the_sample() -> None:
    """One value that does not fit: its image is staged again, and no sum is computed again."""
    case = Case((2, 20, 30, 24), (10, 20, 3, 3), padding=(1, 1))
    x, dy, w = case.operands()
    x[0, 3, 5, 5], dy[1, 2, 7, 7] = 1e6, 1e6
    case.check(x, dy, w)


@pytest.mark.parametrize("size", [1e-6, 1e-10, 1e-30])
def test_images_of_zeros_spoil_nothing(size: float) -> None:
    """Their scale does not affect the images beside them in a slab."""
    case = CASES["many small"]
    x, dy, w = case.operands()
    dy *= size
    dy[1::2] = 0
    x[::4] = 0
    case.check(x, dy, w)


@pytest.mark.parametrize("hot", [1e6, 1e12, 1e30])
def test_one_far_larger_value_spoils_nothing(hot: float) -> None:
    case = Case((2, 20, 30, 24), (10, 20, 3, 3), padding=(1, 1), mends=True)
    x, dy, w = case.operands()
    dy[1, 2, 7, 7] = hot
    (dx, dw), (exact_dx, exact_dw) = case.run(x, dy, w), case.exact(x, dy, w)
    others = [0, 1, *range(3, 10)]
    assert error(dx[1, :, 12:], exact_dx[1, :, 12:]) < 6e-4
    assert error(dw[others], exact_dw[others]) < 6e-4
    assert error(dw[2], exact_dw[2]) < 6e-4


def test_infinity_and_nan_are_where_they_belong() -> None:
    case = replace(CASES["3x3, nothing beside"], mends=True)
    x, dy, w = case.operands()
    x[0, 3, 5, 5], dy[0, 2, 7, 7] = math.inf, math.nan
    for found, exact in zip(case.run(x, dy, w), case.exact(x, dy, w), strict=True):
        assert torch.equal(found.isnan(), exact.isnan())
        assert torch.equal(found.isinf(), exact.isinf())


def test_any_number_of_parts() -> None:
    case = Case((3, 4, 10, 9), (5, 4, 3, 3), padding=(1, 1))
    x, dy, w = case.operands()
    for parts in (1, 3, 17):
        some = replace(case, parts=parts)
        first, again = some.run(x, dy, w)[1], some.run(x, dy, w)[1]
        assert torch.equal(first, again)
        some.check(x, dy, w)
