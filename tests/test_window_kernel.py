"""The tensor-core convolution kernel, run without a GPU: g++, fibers and tests/sm90_on_host.hpp.

As in test_product_kernel.py, every index, swizzle, shift, edge and phase of a barrier is the
kernel's own; nvcc's code, the memory model and how tensor cores round are not seen here.
"""

from __future__ import annotations

import ctypes
import functools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cores_on_host import library_of

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
using End = Ends<Plain>;
}  // namespace
#define ENTRY(name, kind, lanes)                                                                \
  extern "C" int window_##name(                                                                 \
      const fw::WindowInput* x, const fw::WindowWeights* w, const fw::WindowShape* shape,       \
      float* out, int vectors) {                                                                \
    memset(emulated_shared, 0xff, sizeof(emulated_shared));  /* NaN */                          \
    const int64_t plane = shape->y.out * shape->x.out;                                          \
    const Plain plain{out, shape->images * plane, plane, shape->groups * shape->channels_out};  \
    return fw::window<fw::WindowKind<kind>, lanes>(End{{{plain}}}, vectors, *x, *w, *shape, 0,  \
                                                   nullptr);                                    \
  }
#define KIND(...) __VA_ARGS__
ENTRY(1_64, KIND(1, 64), 4)
ENTRY(1_128, KIND(1, 128), 2)
ENTRY(3_64, KIND(3, 64), 2)
ENTRY(3_128, KIND(3, 128), 4)
ENTRY(turns, KIND(1, 128, true), 2)
#define LINES(name, kind, lanes)                                                                \
  extern "C" int window_lines_##name(                                                           \
      const fw::WindowInput* x, const fw::WindowWeights* w, const fw::WindowShape* shape,       \
      float* out, int vectors) {                                                                \
    memset(emulated_shared, 0xff, sizeof(emulated_shared));                                     \
    const int64_t plane = shape->y.out * shape->x.out;                                          \
    const Plain plain{out, shape->images * plane, plane, shape->groups * shape->channels_out};  \
    const fw::WindowSizes sizes(*shape, 1, 1);                                                  \
    const int places = shape->images * shape->groups, lines_of = sizes.blocks() * shape->planes; \
    std::vector<uint16_t> rows(sizes.positions() * shape->groups * lines_of * 64, 0x7e00);      \
    std::vector<float> scales(places, 256.f);                                                   \
    std::vector<fw::LineCounts> counts(places);                                                 \
    const fw::WindowLines lines{reinterpret_cast<fw::half*>(rows.data()), scales.data(),        \
                                counts.data()};                                                 \
    return fw::line_window<fw::LineKind<kind>, lanes>(End{{{plain}}}, vectors, *x, *w, *shape,  \
                                                      lines, 0, nullptr);                       \
  }
LINES(256, 256, 2)
LINES(128, 128, 4)
extern "C" int64_t quotient_and_rest(uint32_t x, int by) {
  uint32_t quotient, rest;
  fw::Divisor(by).divide(x, quotient, rest);
  return int64_t(quotient) << 32 | rest;
}
"""


class Input(ctypes.Structure):
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
        ("out_z", ctypes.c_int * 2),  # count, apart
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
    return library_of("sm90_line_window.cuh", "#include <vector>", BODY)


@dataclass(frozen=True)
class Window:
    """A convolution and how the kernel is to go about it."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    terms: int = 1
    tile: int = 64  # out channels
    band_width: int | None = None  # the whole width
    shares: bool = False  # the zeros after a row and an image with those before the next
    rounds_rows: bool = False  # up to a multiple of four
    mends: bool = False  # whether sums may have to be made anew
    vectors: bool = False  # positions go through the epilogue together
    turns: bool = False  # a tile has all out channels
    lines: int = 0  # positions of a tile whose input comes from lines

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
        positions = 256 if self.terms == 1 and self.tile <= 64 and not self.turns else 128
        positions = self.lines or positions
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
        """By the kernel, which returns `code`; every output must be visited once."""
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
        kind = "turns" if self.turns else f"{self.terms}_{self.tile}"
        kind = f"lines_{self.lines}" if self.lines else kind
        entry = getattr(library(), f"window_{kind}")
        found = entry(
            ctypes.byref(Input(x.data_ptr(), five_strides(x))),
            ctypes.byref(self.weights(pointers, w)),
            ctypes.byref(shape),
            ctypes.c_void_p(out.data_ptr()),
            int(self.vectors),
        )
        assert found == code and (code or not (out == UNSEEN).any())
        return out


def error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def check(window: Window, x: Tensor, w: Tensor) -> None:
    found = error(window.run(x, w), window.exact(x, w))
    assert found < (6e-4 if window.terms == 1 else 4e-7)


# Images, kernel with its out and in channels of a group, and the rest.
SAME = Window(padding=(1, 1))
WINDOWS = {
    "3x3": ((1, 64, 16, 16), (64, 64, 3, 3), SAME),
    "1x1": ((1, 130, 9, 11), (100, 130, 1, 1), Window()),
    "5x5": ((2, 16, 11, 9), (5, 16, 5, 5), Window(padding=(2, 2))),
    "7x7": ((1, 3, 30, 34), (64, 3, 7, 7), Window((2, 2), (3, 3))),
    "stride": ((2, 70, 13, 12), (130, 70, 3, 3), Window((2, 2), (1, 1))),
    "dilation": ((1, 16, 14, 10), (20, 16, 3, 3), Window((1, 1), (2, 2), (2, 2))),
    "stride and dilation": ((1, 33, 19, 17), (8, 33, 3, 3), Window((3, 2), (1, 2), (2, 3))),
    "asymmetric": ((2, 20, 12, 15), (7, 20, 3, 5), Window((1, 2), (0, 2), (2, 1))),
    "no halo": ((1, 48, 13, 13), (10, 48, 2, 2), Window((3, 3))),
    "1x1, stride": ((3, 64, 9, 8), (64, 64, 1, 1), Window((2, 2))),
    "groups": ((2, 40, 8, 9), (12, 20, 3, 3), replace(SAME, groups=2)),
    "many small": ((13, 16, 7, 7), (24, 16, 3, 3), SAME),
    "one pixel": ((5, 8, 1, 1), (6, 8, 3, 3), SAME),
    "bands": ((2, 16, 9, 20), (6, 16, 3, 3), replace(SAME, band_width=8)),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize(("terms", "tile"), [(1, 64), (1, 128), (3, 64), (3, 128)])
def test_every_kind_of_window(name: str, terms: int, tile: int, vectors: bool) -> None:
    torch.manual_seed(len(name))
    images, kernel, window = WINDOWS[name]
    window = replace(window, terms=terms, tile=tile, vectors=vectors, rounds_rows=vectors)
    check(window, torch.randn(images), torch.randn(kernel))


def rearranged(x: Tensor, layout: str) -> Tensor:
    """The same numbers, laid out otherwise; what lies between them is NaN."""
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    room = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 2, 2 * x.shape[3]), math.nan)
    sliced = room[:, 1:-2, 1:-1, ::2] if layout == "sliced" else room[:, 2:-1, 1:-1, : x.shape[3]]
    if layout == "other order":
        sliced = torch.full((*x.shape[2:], x.shape[0], x.shape[1] + 1), math.nan)[..., 1:]
        sliced = sliced.permute(2, 3, 0, 1)
    return sliced.copy_(x)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("layout", ["channels last", "rows", "sliced", "other order"])
@pytest.mark.parametrize("channels", [68, 36, 7])
def test_layouts(layout: str, channels: int, terms: int) -> None:
    torch.manual_seed(channels)
    x, w = rearranged(torch.randn(2, channels, 9, 10), layout), torch.randn(8, channels, 3, 2)
    check(
        Window((1, 2), (1, 1), terms=terms),
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
def test_longer_rows(width: int, band_width: int | None, tile: int, terms: int) -> None:
    window = replace(SAME, rounds_rows=True, band_width=band_width, tile=tile, terms=terms)
    check(window, torch.randn(3, 16, 8, width), torch.randn(37, 16, 3, 3))


@pytest.mark.parametrize("terms", [1, 3])
def test_one_stage_is_enough(terms: int) -> None:
    """Where only one fits, converting and multiplying take turns."""
    window = Window((1, 1), (2, 2), (2, 2), terms=terms)
    x, w = torch.randn(1, 70, 7, 130 if terms == 1 else 60), torch.randn(4, 70, 3, 3)
    assert 2 * window.shape(x, w).stage_rows * 128 * (1 if terms == 1 else 2) > 180 * 1024
    check(window, x, w)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("powers", [(0, 30), (30, 0), (0, -30), (-60, 40), (-100, 20), (120, 90)])
def test_scales_that_jump(powers: tuple[int, int], terms: int) -> None:
    """From one block of channels to the next and from one image to the next."""
    torch.manual_seed(0)
    # The input's scale is undone before the weights': sums of 2^120 are too large in between.
    window = replace(SAME, terms=terms, mends=max(powers) > 100)
    jump = torch.tensor(powers).double()
    x, w = torch.rand(1, 128, 8, 9) + 0.5, torch.randn(8, 128, 3, 3) * 2.0**-10
    by_channels = x * torch.exp2(jump).float().repeat_interleave(64).view(1, 128, 1, 1)
    check(window, by_channels, w)
    by_images = torch.randn(2, 8, 18, 15) * torch.exp2(jump).float().view(2, 1, 1, 1)
    y, exact = window.run(by_images, w[:, :8]), window.exact(by_images, w[:, :8])
    # A tile that holds rows of both, as the second does, has the larger one's scale.
    for image, rows in ((0, slice(0, 7)), (1, slice(11, 18))):
        assert error(y[image, :, rows], exact[image, :, rows]) < (6e-4 if terms == 1 else 4e-7)


@pytest.mark.parametrize("powers", [(-64, -62), (-58, -64), (-100, -20), (60, -100)])
@pytest.mark.parametrize("terms", [1, 3])
def test_small_operands_do_not_vanish(powers: tuple[int, int], terms: int) -> None:
    """The inverses of both scales have a product that is too small for a float."""
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
def test_walks_from_tile_to_tile(
    channels: int, layout: torch.memory_format, terms: int, tile: int
) -> None:
    """Of two groups and two tiles of out channels each; scales change on the way."""
    torch.manual_seed(0)
    window = replace(SAME, groups=2, tile=tile, terms=terms)
    x, w = torch.randn(3, 2 * channels, 20, 18), torch.randn(2 * tile + 4, channels, 3, 3)
    x = (x * torch.exp2(torch.tensor([0.0, 12.0, -20.0])).view(3, 1, 1, 1)).contiguous(
        memory_format=layout
    )
    y, exact = window.run(x, w), window.exact(x, w)
    # Tiles that hold rows of two images have the larger one's scale.
    for image, rows in ((0, slice(0, 4)), (1, slice(None)), (2, slice(16, 20))):
        of_image = error(y[image, :, rows], exact[image, :, rows])
        assert of_image < (6e-4 if terms == 1 else 1e-6)


@pytest.mark.parametrize("terms", [1, 3])
def test_zeros(terms: int) -> None:
    window = replace(SAME, terms=terms)
    x, w = torch.zeros(1, 70, 8, 9), torch.randn(8, 70, 3, 3)
    assert not window.run(x, w).any() and not window.run(torch.randn_like(x), w * 0).any()
    x[0, 66, 3, 3] = 1e-40
    y, exact = window.run(x, w), window.exact(x, w)
    assert float((y - exact).abs().max()) < 1e-43


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("huge", [False, True])
def test_what_is_not_finite_is_where_it_belongs(huge: bool, terms: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 70, 8, 8), torch.randn(6, 70, 3, 3)
    most = 3e38 if huge else math.inf
    x[0, 3, 4, 4], x[1, 67, 0, 7] = most, -most
    if not huge:
        x[1, 2, 7, 0], w[2, 5, 1, 1], w[3, 68, 0, 0] = math.nan, math.inf, -math.inf
    w = w.contiguous(memory_format=torch.channels_last)  # read again where the sum is not finite
    window = replace(SAME, terms=terms, mends=True)
    y, exact = window.run(x, w), window.exact(x, w).float()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
    assert torch.equal(y[y.isinf()], exact[exact.isinf()])


def test_one_term_is_as_exact_as_halves() -> None:
    x, w = torch.randn(1, 64, 8, 8), torch.randn(8, 64, 3, 3)
    assert 5e-5 < error(SAME.run(x, w), SAME.exact(x, w)) < 6e-4


def test_nothing() -> None:
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
