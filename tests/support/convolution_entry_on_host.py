"""The entry of tensor-core convolutions, built by g++: it arranges weights and calls a kernel."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import astuple, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.codegen.convolution import staged_workspace
from fusewright.codegen.source import ALIGNMENT
from fusewright.cost.conv_tensor_core import best_band
from fusewright.ir.convolution import SINGLE, ConvAxis, Geometry, by_eight
from fusewright.ir.graph import Dim
from tests.support.convolution_on_host import BODY as CONVOLUTION_BODY
from tests.support.convolution_on_host import UNSEEN, Strided, five_strides
from tests.support.tensor_cores_on_host import library_of

BODY = (
    CONVOLUTION_BODY[: CONVOLUTION_BODY.index("#define ENTRY")]
    + r"""
#define ENTRY(name, terms, way)                                                                   \
  extern "C" int convolution_##name(const fw::ConvInput* x, const fw::ConvFilter* filter,         \
                                    const fw::ConvolutionSizes* sizes, void* workspace,           \
                                    void* staged, float* out) {                                   \
    const bool eight = sizes->row_order.by_eight();                                               \
    const int64_t plane = int64_t(sizes->z.out) * sizes->y.out *                                  \
                          (eight ? sizes->row_order.columns : sizes->x.out);                      \
    const int outs = sizes->groups * (eight ? sizes->row_order.channels : sizes->channels_out);   \
    const Plain plain{out, sizes->images * plane, plane, outs};                                   \
    return fw::convolution<terms, fw::way, 2>(Epilogue{{{plain}}}, true, *x, *filter, *sizes,     \
                                              workspace, staged, 0, nullptr);                     \
  }
ENTRY(1_64, 1, ByTiles<64>)
ENTRY(1_128, 1, ByTiles<128>)
ENTRY(3_64, 3, PingPong<64>)
ENTRY(3_128, 3, PingPong<128>)
namespace fw {
using Staged = ByStagedInput<128, 128>;
using FewStaged = ByStagedInput<64, 128, 1>;
using WovenStaged = ByStagedInput<128, 256, 2>;
using Few = ByTiles<64, 1>;
template <int kTileChannels>
using Woven = ByTiles<kTileChannels, 2>;
using WovenPingPong = PingPong<128, 2>;
}
ENTRY(staged, 1, Staged)
ENTRY(few_1_64, 1, Few)
ENTRY(few_3_64, 3, Few)
ENTRY(few_staged, 1, FewStaged)
ENTRY(woven_1_64, 1, Woven<64>)
ENTRY(woven_1_128, 1, Woven<128>)
ENTRY(woven_3_64, 3, Woven<64>)
ENTRY(woven_3_128, 3, Woven<128>)
ENTRY(woven_staged, 1, WovenStaged)
ENTRY(woven_ping_pong, 1, WovenPingPong)
namespace {
struct Twice {
  struct Raw {
    float x, again;
  };
  struct Factors {
    float factor;
    int image, channel;
  };
  fw::ConvInput x;
  Raw read(int image, int channel, int z, int y, int column) const {
    if (image < 0 || channel < 0 || z < 0 || y < 0 || column < 0) std::abort();
    const float number = x.at(x.location(image, channel, z, y, column));
    return {number, number};
  }
  Factors factors(int image, int channel) const { return {2, image, channel}; }
  float value(const Raw& raw, const Factors& of, int image, int channel, int, int, int) const {
    return image == of.image && channel == of.channel ? raw.x + (of.factor - 1) * raw.again : 1e9f;
  }
};
}  // namespace
#define COMPUTED(name, terms, way)                                                                \
  extern "C" int convolution_computed_##name(                                                     \
      const fw::ConvInput* x, const fw::ConvFilter* filter,                                       \
      const fw::ConvolutionSizes* sizes, void* workspace, void* staged, float* out) {             \
    const int64_t plane = int64_t(sizes->z.out) * sizes->y.out * sizes->x.out;                    \
    const int outs = sizes->groups * sizes->channels_out;                                         \
    const Plain plain{out, sizes->images * plane, plane, outs};                                   \
    const auto run = [&](auto by_four) {                                                          \
      const fw::ComputedInput<Twice, decltype(by_four)::value> twice{{*x}};                       \
      return fw::convolution<terms, fw::way, 2>(Epilogue{{{plain}}}, true, twice, *filter, *sizes, \
                                                workspace, staged, 0, nullptr);                   \
    };                                                                                            \
    return x->by_channels(sizes->channels) ? run(std::true_type()) : run(std::false_type());      \
  }
COMPUTED(staged, 1, Staged)
COMPUTED(3_64, 3, ByTiles<64>)
"""
)


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
        ("shares_staged", ctypes.c_bool),
    )


@functools.cache
def library() -> ctypes.CDLL:
    return library_of("sm90/convolution/sm90_convolution.cuh", BODY)


def axis_of(size: int, taps: int, stride: int, dilation: int, before: int) -> ConvAxis:
    result = (size + 2 * before - dilation * (taps - 1) - 1) // stride + 1
    return ConvAxis(size, result, taps, stride, dilation, before)


def axis_fields(axis: ConvAxis) -> ctypes.Array[ctypes.c_int]:
    given = (axis.size, axis.result, axis.taps, axis.stride, axis.dilation, axis.before, axis.least)
    return (ctypes.c_int * 7)(*given)


def sizes_of(of: Geometry, band: int) -> Sizes:
    sizes = Sizes(of.images.factor, (ctypes.c_int * 3)(of.groups, of.channels, of.results))
    sizes.z, sizes.y, sizes.x = map(axis_fields, of.axes)
    sizes.band_width, sizes.transposed = band, of.transposed
    if of.row_order:
        sizes.row_order = (ctypes.c_int * 5)(*astuple(of.row_order))
    return sizes


def run(of: Geometry, x: Tensor, w: Tensor, terms: int, way: str = "tiles") -> Tensor:
    """The convolution by the entry that the heuristic's schedule would call; w may have any
    strides. A way that begins with "by eight" arranges weights in groups of eight."""
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
    staged_bytes = staged_workspace(of, band).at({}) - ALIGNMENT
    staged = torch.full((staged_bytes + 512,), 0xFF, dtype=torch.uint8)
    skipped = -staged.data_ptr() % 256
    kind = f"{terms}_{64 if of.results <= 64 else 128}" if way == "tiles" else way
    kind = f"{('few', 'woven')[of.row_order.beside - 1]}_{kind}" if of.row_order else kind
    parts = [ctypes.byref(each) for each in (source, filter_, sizes)]
    places = (workspace.data_ptr() + skip, staged.data_ptr() + skipped, out.data_ptr())
    entry = getattr(library(), f"convolution_{kind}")
    assert entry(*parts, *map(ctypes.c_void_p, places)) == 0
    assert (staged[skipped + staged_bytes :] == 0xFF).all(), "beyond the staged input"
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


WAYS = [(1, "tiles"), (3, "tiles"), (1, "staged")]


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
            ConvAxis(*each, transposed=True)
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
