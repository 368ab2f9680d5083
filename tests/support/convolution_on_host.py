"""The tensor-core convolution kernel, run without a GPU: g++, fibers and sm90_on_host.hpp.

Every index, swizzle, shift, edge and barrier phase is the kernel's own. nvcc's code, the memory
model and the rounding of tensor cores are not tested here.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tensor_cores_on_host import library_of
from tests.support.tensors import error

UNSEEN = 12345.0
BODY = r"""
namespace {
struct Plain {
  float* out;
  int64_t columns;  // positions of all images
  int64_t plane, channels;
  template <int V> struct Elem { float y[V]; };
  template <int V> void load(Elem<V>&, int64_t q, int64_t) const {
    if (q >= channels) std::abort();
  }
  template <int V> void give(Elem<V>& elem, int v, float x) const { elem.y[v] = x; }
  template <int V> void visit(const Elem<V>& elem, int64_t q, int64_t l, int) const {
    for (int v = 0; v < V; ++v) {
      const int64_t image = l / plane, at = l % plane + v;
      float& place = out[(image * channels + q) * plane + at];
      if (place != 12345.f) std::abort();  // twice
      place = elem.y[v];
    }
  }
};
using Epilogue = Ends<Plain>;
}  // namespace
#define ENTRY(name, kind, lanes)                                                                  \
  extern "C" int tiled_##name(                                                                    \
      const fw::ConvInput* x, const fw::SplitFilter* w, const fw::ConvShape* shape,               \
      float* out, int vectors) {                                                                  \
    memset(emulated_shared, 0xff, sizeof(emulated_shared));  /* NaN */                            \
    const int64_t plane = shape->y.out * shape->x.out;                                            \
    const Plain plain{out, shape->images * plane, plane, shape->groups * shape->channels_out};    \
    return fw::tensor_core_convolution<fw::ConvKind<kind>, lanes>(                                \
        Epilogue{{{plain}}}, vectors, *x, *w, *shape, 0, nullptr);                                \
  }
#define KIND(...) __VA_ARGS__
ENTRY(1_64, KIND(1, 64), 4)
ENTRY(1_128, KIND(1, 128), 2)
ENTRY(3_64, KIND(3, 64), 2)
ENTRY(3_128, KIND(3, 128), 4)
ENTRY(ping_pong, KIND(1, 128, true), 2)
#define STAGED(name, kind, lanes)                                                                 \
  extern "C" int staged_##name(                                                                   \
      const fw::ConvInput* x, const fw::SplitFilter* w, const fw::ConvShape* shape,               \
      float* out, int vectors) {                                                                  \
    memset(emulated_shared, 0xff, sizeof(emulated_shared));                                       \
    const int64_t plane = shape->y.out * shape->x.out;                                            \
    const Plain plain{out, shape->images * plane, plane, shape->groups * shape->channels_out};    \
    const fw::ConvTiling sizes(*shape, 1, 1);                                                     \
    const int images = shape->images * shape->groups;                                             \
    const int staged_rows = sizes.blocks() * shape->planes;                                       \
    std::vector<uint16_t> rows(sizes.positions() * shape->groups * staged_rows * 64, 0x7e00);     \
    std::vector<float> scales(images, 256.f);                                                     \
    std::vector<fw::StagedCounts> counts(images);                                                 \
    const fw::StagedInput staged{reinterpret_cast<fw::half*>(rows.data()), scales.data(),         \
                                counts.data()};                                                   \
    return fw::staged_convolution<fw::StagedConvKind<kind>, lanes>(                               \
        Epilogue{{{plain}}}, vectors, *x, *w, *shape, staged, 0, nullptr);                        \
  }
STAGED(256, 256, 2)
STAGED(128, 128, 4)
extern "C" int64_t quotient_and_rest(uint32_t x, int by) {
  uint32_t quotient, rest;
  fw::Divisor(by).divide(x, quotient, rest);
  return int64_t(quotient) << 32 | rest;
}
"""


class Strided(ctypes.Structure):
    """ConvInput and WeightGradient."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 5))


class Weights(ctypes.Structure):
    _fields_ = (
        ("pointers", ctypes.c_void_p * 4),
        ("strides", ctypes.c_int64 * 6),  # along groups, their out channels, in channels, z, y, x
        ("order", ctypes.c_uint8 * 128 * 2),
        ("far", ctypes.c_int * 128 * 2),
    )


class Phase(ctypes.Structure):
    _fields_ = (
        ("places", ctypes.c_int * 5),  # z, y, x, reach, deeper
        ("counts", ctypes.c_uint8 * 4),  # taps, first, tap_z, plane
    )


class Shape(ctypes.Structure):
    _fields_ = (
        ("counts", ctypes.c_int * 4),  # images, groups, channels in and out of a group
        ("z", ctypes.c_int * 7),  # in, out, kernel, stride, dilation, padding
        ("y", ctypes.c_int * 7),
        ("x", ctypes.c_int * 7),
        ("out_z", ctypes.c_int * 2),  # count, distance
        ("out_y", ctypes.c_int * 2),
        ("out_x", ctypes.c_int * 2),
        ("transposed", ctypes.c_bool),
        ("row_order", ctypes.c_int * 5),
        ("band_width", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("stage_rows", ctypes.c_int),
        ("taps", ctypes.c_int),
        ("phases", ctypes.c_int),
        ("classes", ctypes.c_int),
        ("planes", ctypes.c_int),
        ("phase", Phase * 16),
        ("shift", ctypes.c_uint16 * 128),
        ("class_", ctypes.c_uint8 * 5 * 16),  # first and end phase, z, y, x
        ("plane", ctypes.c_int * 3 * 16),  # z, y, x
    )


def five_strides(x: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Along images, channels, z, y and x; images may have no z."""
    first, second, *rest = x.stride()
    return (ctypes.c_int64 * 5)(first, second, *[0] * (3 - len(rest)), *rest)


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel's own text, its instructions replaced by the stand-ins."""
    return library_of("sm90/convolution/sm90_staged_convolution.cuh", "#include <vector>", BODY)


@dataclass(frozen=True)
class ConvCase:
    """A convolution and the settings of the kernel."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    terms: int = 1
    tile: int = 64  # out channels
    band_width: int | None = None  # the whole width
    shares: bool = False  # the zeros after a row and an image with those before the next
    rounds_rows: bool = False  # up to a multiple of four
    mends: bool = False  # whether sums may have to be computed again
    vectors: bool = False  # positions go through the epilogue together
    ping_pong: bool = False  # a tile has all out channels
    staged: int = 0  # positions of a tile with staged input; 0: not staged

    def taps(self, kernel: tuple[int, int]) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """The taps (ky, kx) of each phase."""
        by_phase: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for ky in range(kernel[0]):
            for kx in range(kernel[1]):
                phase = (
                    ky * self.dilation[0] % self.stride[0],
                    kx * self.dilation[1] % self.stride[1],
                )
                by_phase.setdefault(phase, []).append((ky, kx))
        return dict(sorted(by_phase.items()))

    def shape(self, x: Tensor, w: Tensor) -> Shape:
        """The problem, its bands and its taps, as the kernel takes them."""
        shape = Shape()
        out_channels, channels, *kernel = w.shape
        shape.counts[:] = (x.shape[0], self.groups, channels, out_channels // self.groups)
        shape.z, shape.out_z, shape.depth = (1, 1, 1, 1, 1, 0), (1, 1), 1
        halos, extents = [], []
        for axis, name in enumerate("yx"):
            n, k, s = x.shape[2 + axis], kernel[axis], self.stride[axis]
            reach = (k - 1) * self.dilation[axis]
            out = (n + 2 * self.padding[axis] - reach - 1) // s + 1
            numbers = (n, out, k, s, self.dilation[axis], self.padding[axis])
            setattr(shape, name, (ctypes.c_int * 7)(*numbers))
            setattr(shape, f"out_{name}", (ctypes.c_int * 2)(out, 1))
            halos.append(reach // s)
            shared = max(out, n + self.padding[axis], out + reach - self.padding[axis])
            extents.append(shared if self.shares and s == 1 else out + halos[-1])
        shape.rows = extents[0]
        shape.band_width = self.band_width or shape.x[1]
        shape.pitch = shape.band_width + halos[1] if self.band_width else extents[1]
        if self.rounds_rows:
            shape.pitch = -(-shape.pitch // 4) * 4
        for phase, ((y, column), taps) in enumerate(self.taps((kernel[0], kernel[1])).items()):
            shifts = [
                ky * self.dilation[0] // self.stride[0] * shape.pitch
                + kx * self.dilation[1] // self.stride[1]
                for ky, kx in taps
            ]
            shape.phase[phase].places[:] = (0, y, column, max(shifts), 0)
            shape.phase[phase].counts[:] = (len(taps), shape.taps, 0, phase)
            shape.plane[phase][:] = (0, y, column)
            shape.shift[shape.taps : shape.taps + len(taps)] = shifts
            shape.taps += len(taps)
            shape.phases += 1
        shape.classes, shape.planes = 1, shape.phases
        shape.class_[0][:] = (0, shape.phases, 0, 0, 0)
        reach = max(each.places[3] for each in shape.phase)
        positions = 256 if self.terms == 1 and self.tile <= 64 and not self.ping_pong else 128
        positions = self.staged or positions
        shape.stage_rows = -(-(positions + reach) // 8) * 8
        return shape

    def boxes(self, w: Tensor) -> Tensor:
        """[box, out channel, 64]: of each group, 64 channels and phase, the taps' steps of 16."""
        found = []
        for of_group in w.chunk(self.groups):
            for block in of_group.split(64, 1):
                padded = F.pad(block, (0, 0, 0, 0, 0, -block.shape[1] % 16))
                for taps in self.taps((w.shape[2], w.shape[3])).values():
                    row = torch.cat([padded[:, :, ky, kx] for ky, kx in taps], 1)
                    row = F.pad(row, (0, -row.shape[1] % 64))
                    found.append(row.unflatten(1, (-1, 64)).transpose(0, 1))
        return torch.cat(found)

    def weights(self, pointers: ctypes.Array[ctypes.c_void_p], w: Tensor) -> Weights:
        per_group = w.shape[0] // self.groups * w.stride(0)
        made = Weights(pointers, (ctypes.c_int64 * 6)(per_group, *five_strides(w)))
        by_phase = self.taps((w.shape[2], w.shape[3])).values()
        for at, tap in enumerate(tap for taps in by_phase for tap in taps):
            for axis in range(2):
                made.order[axis][at] = tap[axis]
                made.far[axis][at] = tap[axis] * self.dilation[axis] - self.padding[axis]
        return made

    def exact(self, x: Tensor, w: Tensor) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(x.double(), w.double(), None, *settings)

    def run(self, x: Tensor, w: Tensor, code: int = 0) -> Tensor:
        """The result of the kernel, which must return `code` and visit every output once."""
        size = torch.where(w.isfinite(), w.abs(), 0).amax((1, 2, 3), keepdim=True)
        scale = torch.ldexp(torch.ones_like(size), 15 - torch.frexp(size).exponent)
        scaled = self.boxes(w * scale)
        hi = scaled.half().contiguous()
        lo = (scaled - hi.float()).half().contiguous()
        inverse = (1 / scale).flatten()
        raw = w if self.mends else w * math.nan
        shape = self.shape(x, w)
        out = torch.full((x.shape[0], w.shape[0], shape.y[1], shape.x[1]), UNSEEN)
        pointers = (ctypes.c_void_p * 4)(*(each.data_ptr() for each in (hi, lo, inverse, raw)))
        kind = "ping_pong" if self.ping_pong else f"{self.terms}_{self.tile}"
        name = f"staged_{self.staged}" if self.staged else f"tiled_{kind}"
        entry = getattr(library(), name)
        found = entry(
            ctypes.byref(Strided(x.data_ptr(), five_strides(x))),
            ctypes.byref(self.weights(pointers, w)),
            ctypes.byref(shape),
            ctypes.c_void_p(out.data_ptr()),
            int(self.vectors),
        )
        assert found == code and (code or not (out == UNSEEN).any())
        return out


def check(case: ConvCase, x: Tensor, w: Tensor) -> None:
    found = error(case.run(x, w), case.exact(x, w))
    assert found < (6e-4 if case.terms == 1 else 4e-7)


# Images, kernel with its out and in channels of a group, and the rest.
SAME = ConvCase(padding=(1, 1))
CONVOLUTIONS = {
    "3x3": ((1, 64, 16, 16), (64, 64, 3, 3), SAME),
    "1x1": ((1, 130, 9, 11), (100, 130, 1, 1), ConvCase()),
    "5x5": ((2, 16, 11, 9), (5, 16, 5, 5), ConvCase(padding=(2, 2))),
    "7x7": ((1, 3, 30, 34), (64, 3, 7, 7), ConvCase((2, 2), (3, 3))),
    "stride": ((2, 70, 13, 12), (130, 70, 3, 3), ConvCase((2, 2), (1, 1))),
    "dilation": ((1, 16, 14, 10), (20, 16, 3, 3), ConvCase((1, 1), (2, 2), (2, 2))),
    "stride and dilation": ((1, 33, 19, 17), (8, 33, 3, 3), ConvCase((3, 2), (1, 2), (2, 3))),
    "asymmetric": ((2, 20, 12, 15), (7, 20, 3, 5), ConvCase((1, 2), (0, 2), (2, 1))),
    "no halo": ((1, 48, 13, 13), (10, 48, 2, 2), ConvCase((3, 3))),
    "1x1, stride": ((3, 64, 9, 8), (64, 64, 1, 1), ConvCase((2, 2))),
    "groups": ((2, 40, 8, 9), (12, 20, 3, 3), replace(SAME, groups=2)),
    "many small": ((13, 16, 7, 7), (24, 16, 3, 3), SAME),
    "one pixel": ((5, 8, 1, 1), (6, 8, 3, 3), SAME),
    "bands": ((2, 16, 9, 20), (6, 16, 3, 3), replace(SAME, band_width=8)),
}


def rearranged(x: Tensor, layout: str) -> Tensor:
    """The same values in another layout. Memory between them holds NaN."""
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    room = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 2, 2 * x.shape[3]), math.nan)
    sliced = room[:, 1:-2, 1:-1, ::2] if layout == "sliced" else room[:, 2:-1, 1:-1, : x.shape[3]]
    if layout == "other order":
        sliced = torch.full((*x.shape[2:], x.shape[0], x.shape[1] + 1), math.nan)[..., 1:]
        sliced = sliced.permute(2, 3, 0, 1)
    return sliced.copy_(x)
