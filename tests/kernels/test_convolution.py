"""A convolution as an entry asks for it, run without a GPU: weights split, taps laid out.

test_window_kernel.py looks at the kernel itself, with weights and taps that Python lays out.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import astuple, dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.codegen.convolution import lines_of
from fusewright.codegen.source import ALIGNMENT
from fusewright.cost.conv_tensor_core import best_band
from fusewright.ir.convolution import SINGLE, Geometry, WindowAxis, by_eight
from fusewright.ir.graph import Dim
from tests.support.convolution_on_host import BODY as WINDOW_BODY
from tests.support.convolution_on_host import five_strides
from tests.support.tensor_cores_on_host import library_of

BODY = (
    WINDOW_BODY[: WINDOW_BODY.index("#define ENTRY")]
    + r"""
#define ENTRY(name, terms, way)                                                                 \
  extern "C" int convolution_##name(const fw::WindowInput* x, const fw::WindowFilter* filter,   \
                                    const fw::ConvolutionSizes* sizes, void* workspace,         \
                                    void* lines, float* out) {                                  \
    const bool eight = sizes->row_order.by_eight();                                             \
    const int64_t plane = int64_t(sizes->z.out) * sizes->y.out *                                \
                          (eight ? sizes->row_order.columns : sizes->x.out);                    \
    const int outs = sizes->groups * (eight ? sizes->row_order.channels : sizes->channels_out); \
    const Plain plain{out, sizes->images * plane, plane, outs};                                 \
    return fw::convolution<terms, fw::way, 2>(End{{{plain}}}, true, *x, *filter, *sizes,        \
                                              workspace, lines, 0, nullptr);                    \
  }
ENTRY(1_64, 1, ByTiles<64>)
ENTRY(1_128, 1, ByTiles<128>)
ENTRY(3_64, 3, InTurns<64>)
ENTRY(3_128, 3, InTurns<128>)
namespace fw {
using Lines = ByLines<128, 128>;
using FewLines = ByLines<64, 128, 1>;
using WovenLines = ByLines<128, 256, 2>;
using Few = ByTiles<64, 1>;
template <int kTileChannels>
using Woven = ByTiles<kTileChannels, 2>;
using WovenTurns = InTurns<128, 2>;
}
ENTRY(lines, 1, Lines)
ENTRY(few_1_64, 1, Few)
ENTRY(few_3_64, 3, Few)
ENTRY(few_lines, 1, FewLines)
ENTRY(woven_1_64, 1, Woven<64>)
ENTRY(woven_1_128, 1, Woven<128>)
ENTRY(woven_3_64, 3, Woven<64>)
ENTRY(woven_3_128, 3, Woven<128>)
ENTRY(woven_lines, 1, WovenLines)
ENTRY(woven_turns, 1, WovenTurns)
namespace {
struct Twice {
  struct Raw {
    float x, again;
  };
  struct Factors {
    float factor;
    int image, channel;
  };
  fw::WindowInput x;
  Raw read(int image, int channel, int z, int y, int column) const {
    if (image < 0 || channel < 0 || z < 0 || y < 0 || column < 0) std::abort();
    const float number = x.at(x.place(image, channel, z, y, column));
    return {number, number};
  }
  Factors factors(int image, int channel) const { return {2, image, channel}; }
  float value(const Raw& raw, const Factors& of, int image, int channel, int, int, int) const {
    return image == of.image && channel == of.channel ? raw.x + (of.factor - 1) * raw.again : 1e9f;
  }
};
}  // namespace
#define COMPUTED(name, terms, way)                                                              \
  extern "C" int convolution_computed_##name(                                                   \
      const fw::WindowInput* x, const fw::WindowFilter* filter,                                 \
      const fw::ConvolutionSizes* sizes, void* workspace, void* lines, float* out) {            \
    const int64_t plane = int64_t(sizes->z.out) * sizes->y.out * sizes->x.out;                  \
    const int outs = sizes->groups * sizes->channels_out;                                       \
    const Plain plain{out, sizes->images * plane, plane, outs};                                 \
    const auto run = [&](auto by_four) {                                                        \
      const fw::ComputedInput<Twice, decltype(by_four)::value> twice{{*x}};                     \
      return fw::convolution<terms, fw::way, 2>(End{{{plain}}}, true, twice, *filter, *sizes,   \
                                                workspace, lines, 0, nullptr);                  \
    };                                                                                          \
    return x->by_channels(sizes->channels) ? run(std::true_type()) : run(std::false_type());    \
  }
COMPUTED(lines, 1, Lines)
COMPUTED(3_64, 3, ByTiles<64>)
"""
)


UNSEEN = 12345.0


class Strided(ctypes.Structure):
    """WindowInput and WindowGradient."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 5))


class Filter(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 6))


class Sizes(ctypes.Structure):
    _fields_ = (
        ("images", ctypes.c_int64),
        ("counts", ctypes.c_int * 3),  # groups, channels in and out of a group
        ("z", ctypes.c_int * 7),
        ("y", ctypes.c_int * 7),
        ("x", ctypes.c_int * 7),
        ("band_width", ctypes.c_int),
        ("transposed", ctypes.c_bool),
        ("row_order", ctypes.c_int * 5),
        ("shares_lines", ctypes.c_bool),
    )


@functools.cache
def library() -> ctypes.CDLL:
    return library_of("sm90/convolution/sm90_convolution.cuh", BODY)


def axis_of(size: int, taps: int, stride: int, dilation: int, before: int) -> WindowAxis:
    result = (size + 2 * before - dilation * (taps - 1) - 1) // stride + 1
    return WindowAxis(size, result, taps, stride, dilation, before)


def numbers(axis: WindowAxis) -> ctypes.Array[ctypes.c_int]:
    given = (axis.size, axis.result, axis.taps, axis.stride, axis.dilation, axis.before, axis.least)
    return (ctypes.c_int * 7)(*given)


def sizes_of(of: Geometry, band: int) -> Sizes:
    sizes = Sizes(of.images.factor, (ctypes.c_int * 3)(of.groups, of.channels, of.results))
    sizes.z, sizes.y, sizes.x = map(numbers, of.axes)
    sizes.band_width, sizes.transposed = band, of.transposed
    if of.row_order:
        sizes.row_order = (ctypes.c_int * 5)(*astuple(of.row_order))
    return sizes


def run(of: Geometry, x: Tensor, w: Tensor, terms: int, way: str = "tiles") -> Tensor:
    """As an entry of the heuristic's schedule does it; w may have any strides. With "by eight"
    before the way, weights go so."""
    if way.startswith("by eight "):
        of, way = by_eight(of), way.removeprefix("by eight ")
    band = best_band(of)
    assert band is not None
    results = of.row_order.results if of.row_order else of.results
    images, outs = x.shape[0], of.groups * results
    sizes = sizes_of(of, band)
    source = Strided(x.data_ptr(), five_strides(x))
    first, second, *rest = five_strides(w)
    strides = (results * first, first, second, *rest)
    if of.transposed:
        strides = (of.channels * first, second, first, *rest)
    filter_ = Filter(w.data_ptr(), (ctypes.c_int64 * 6)(*strides))
    rows = [axis.result for axis in (of.z, of.y)][5 - x.dim() :]
    out = torch.full((images, outs, *rows, of.columns), UNSEEN)
    workspace = torch.full((of.workspace_bytes + 256,), 0xFF, dtype=torch.uint8)
    skip = -workspace.data_ptr() % 128
    line_bytes = lines_of(of, band).at({}) - ALIGNMENT
    lines = torch.full((line_bytes + 512,), 0xFF, dtype=torch.uint8)
    skipped = -lines.data_ptr() % 256
    kind = f"{terms}_{64 if of.results <= 64 else 128}" if way == "tiles" else way
    kind = f"{('few', 'woven')[of.row_order.beside - 1]}_{kind}" if of.row_order else kind
    parts = [ctypes.byref(each) for each in (source, filter_, sizes)]
    places = (workspace.data_ptr() + skip, lines.data_ptr() + skipped, out.data_ptr())
    entry = getattr(library(), f"convolution_{kind}")
    assert entry(*parts, *map(ctypes.c_void_p, places)) == 0
    assert (lines[skipped + line_bytes :] == 0xFF).all(), "beyond the lines"
    assert not (out == UNSEEN).any()
    assert (workspace[skip + of.workspace_bytes :] == 0xFF).all(), "beyond the workspace"
    return out


def convolved(
    x: Tensor,
    w: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    terms: int,
    way: str = "tiles",
) -> Tensor:
    *deep, y, across = (
        axis_of(x.shape[2 + at], w.shape[2 + at], stride[at], dilation[at], padding[at])
        for at in range(len(stride))
    )
    of = Geometry(Dim(x.shape[0]), groups, w.shape[1], w.shape[0] // groups, y, across)
    return run(replace(of, z=deep[0]) if deep else of, x, w, terms, way)


WAYS = [(1, "tiles"), (3, "tiles"), (1, "lines")]


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
def test_weights_and_taps(  # type: ignore[no-untyped-def]
    shape, filter_, stride, padding, dilation, groups, terms: int, way: str
) -> None:
    torch.manual_seed(sum(shape))
    x, w = torch.randn(shape), torch.randn(filter_)
    w *= torch.exp2(torch.randint(-30, 30, (filter_[0], 1, 1, 1)).float())
    exact = F.conv2d(x.double(), w.double(), None, stride, padding, dilation, groups)
    y = convolved(x, w, stride, padding, dilation, groups, terms, way)
    wrong, right = (each.transpose(0, 1).flatten(1).norm(dim=1) for each in (y - exact, exact))
    assert float((wrong / right).max()) < (4e-7 if terms == 3 else 8e-4)


@pytest.mark.parametrize("kind", ["lines", "3_64"])
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
def test_an_input_that_is_computed(  # type: ignore[no-untyped-def]
    shape, filter_, stride, padding, groups, last: bool, kind: str
) -> None:
    """By channels, by rows, outside, of the sample, and where sums are made again."""
    torch.manual_seed(sum(shape))
    x, w = torch.randn(shape), torch.randn(filter_)
    x[-1] *= 2.0**40 if kind == "lines" else 2.0**6  # this image is laid out again
    x[0, 0, 1, 1] = 3e38  # and this number is not finite, twice
    if last:
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    terms = 1 if kind == "lines" else 3
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


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution; along y and x, or z, y and x."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    more: tuple[int, ...] = (0, 0)  # output padding
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    def exact(self, x: Tensor, w: Tensor) -> Tensor:
        settings = (self.stride, self.padding, self.more, self.groups, self.dilation)
        transposed = F.conv_transpose2d if x.dim() == 4 else F.conv_transpose3d
        return transposed(x.double(), w.double(), None, *settings)

    def geometry(self, x: Tensor, w: Tensor) -> Geometry:
        made = self.exact(x.to("meta"), w.to("meta")).shape[2:]
        *deep, y, across = (
            WindowAxis(*each, transposed=True)
            for each in zip(
                x.shape[2:], made, w.shape[2:], self.stride, self.dilation, self.padding,
                strict=True,
            )
        )  # fmt: skip
        channels = x.shape[1] // self.groups
        z = deep[0] if deep else replace(SINGLE, transposed=True)
        return Geometry(Dim(x.shape[0]), self.groups, channels, w.shape[1], y, across, z=z)

    def run(self, x: Tensor, w: Tensor, terms: int, way: str = "tiles") -> Tensor:
        return run(self.geometry(x, w), x, w, terms, way)


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
    """A class without taps has no lines."""
    x, w, of = transposed_operands(name)
    whole = of.geometry(x, w)
    kinds = {"": whole} if by_eight(whole) == whole else {"": whole, "by eight ": by_eight(whole)}
    return [
        (terms, eight + way)
        for eight, each in kinds.items()
        for terms, way in WAYS
        if way != "lines" or all(each.classes)
    ]


@pytest.mark.parametrize(
    ("name", "terms", "way"),
    [(name, *way) for name in TRANSPOSED for way in ways_of(name)]
    + [("strides of 1 and 2", 1, "by eight turns")],
)
def test_every_kind_of_transposed_convolution(name: str, terms: int, way: str) -> None:
    x, w, of = transposed_operands(name)
    w *= torch.exp2(torch.randint(-30, 30, (1, w.shape[1], 1, 1)).float())
    y, exact = of.run(x, w, terms, way), of.exact(x, w)
    wrong, right = (each.transpose(0, 1).flatten(1).norm(dim=1) for each in (y - exact, exact))
    assert float((wrong / right).max()) < (4e-7 if terms == 3 else 8e-4)


def test_layouts_of_transposed_operands() -> None:
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
def test_what_is_not_finite_in_a_transposed_one(name: str, terms: int, way: str) -> None:
    """By the definition: there are no zeros that an infinite weight could meet at the edges."""
    x, w, of = transposed_operands(name)
    x[0, 3, 4, 4], x[1, 1, 0, -1], x[1, 2, -1, 0] = math.inf, -math.inf, math.nan
    w[2, 1, 0, 0], w[4, 2, -1, -1], w[-1, 0, 0, -1] = math.inf, -math.inf, 3e38
    y, exact = of.run(x, w, terms, way), of.exact(x, w).float()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
    assert torch.equal(y[y.isinf()], exact[exact.isinf()])
    assert y.isfinite().any() and not y.isfinite().all()


def test_no_transposed_images() -> None:
    x, w, of = transposed_operands("stride 2")
    assert of.run(x[:0], w, 1).shape == (0, 10, 14, 16)


@pytest.mark.parametrize(
    ("size", "kernel", "padding"), [((7, 9), (3, 2), (0, 1)), ((7, 7), (3, 3), (1, 1))]
)
@pytest.mark.parametrize("way", ["tiles", "lines"])
def test_transposed_rows_share_their_zeros(
    size: tuple[int, int], kernel: tuple[int, int], padding: tuple[int, int], way: str
) -> None:
    """Without strides: one class, which may come from lines, several images in a tile."""
    torch.manual_seed(sum(kernel))
    x, w, of = torch.randn(5, 70, *size), torch.randn(70, 12, *kernel), Transposed(padding=padding)
    y, exact = of.run(x, w, 1, way), of.exact(x, w)
    assert float((y - exact).norm() / exact.norm()) < 8e-4
