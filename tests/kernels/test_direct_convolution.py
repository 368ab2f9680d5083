"""Direct convolutions of few channels: the kernel by emulation, and when it is chosen."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.cost.conv_direct import DirectSchedule, best_tile, direct_us, fits
from fusewright.cost.convolution import prefers_direct
from fusewright.ir.convolution import ConvAxis, Geometry
from fusewright.ir.graph import Dim
from fusewright.target.target import Target
from tests.support.convolution_entry_on_host import Filter, Sizes
from tests.support.convolution_on_host import BODY as CONVOLUTION_BODY
from tests.support.convolution_on_host import Strided, five_strides
from tests.support.tensor_cores_on_host import library_of

CUDA = Target.cuda()

UNSEEN = 12345.0


@dataclass(frozen=True)
class Case:
    """A convolution, groups and all; `outs`, `rows` and `across` are the kernel's."""

    images: tuple[int, ...]
    results: int
    kernel: tuple[int, ...]
    outs: int
    rows: int
    across: int
    groups: int = 1
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    transposed: bool = False

    @property
    def taps(self) -> str:
        taps = (*self.kernel[-2:], *self.stride[-2:], *self.dilation[-2:])
        return f"fw::DirectTaps<{', '.join(map(str, taps))}>"

    def call(self, terms: int) -> str:
        shape = f"{terms}, {self.taps}"
        if self.across:
            return f"direct_convolution<{shape}, {self.outs}, {self.rows}, {self.across}>"
        if self.transposed and math.prod(self.stride) > 1:
            phases = (p % s for p, s in zip(self.padding, self.stride, strict=True))
            return f"depthwise_transposed<{shape}, {', '.join(map(str, (self.rows, *phases)))}>"
        return f"depthwise_convolution<{shape}, {self.rows}>"


CASES = {
    "one channel each": Case((2, 6, 20, 37), 6, (3, 3), 1, 8, 32, groups=6, padding=(1, 1)),
    "two each": Case((1, 3, 18, 14), 6, (3, 3), 2, 2, 16, groups=3, padding=(1, 1)),
    "groups of four": Case((2, 8, 9, 9), 8, (3, 3), 4, 1, 8, groups=2, padding=(1, 1)),
    "few channels": Case((2, 3, 21, 40), 19, (3, 3), 8, 4, 32, padding=(1, 1)),
    "7x7, stride 2": Case((1, 3, 40, 41), 10, (7, 7), 8, 2, 16, stride=(2, 2), padding=(3, 3)),
    "dilation": Case((1, 2, 20, 20), 3, (3, 2), 4, 2, 16, dilation=(2, 3), padding=(2, 0)),
    "asymmetric": Case((2, 2, 15, 20), 5, (5, 1), 4, 4, 32, stride=(2, 1), padding=(0, 2)),
    "many channels in": Case((1, 70, 34, 33), 3, (3, 3), 4, 8, 32, padding=(1, 1)),
    "turned round": Case((2, 5, 9, 17), 4, (3, 2), 4, 2, 16, padding=(1, 0), transposed=True),
    "turned round, each": Case(
        (2, 4, 9, 17), 4, (3, 3), 1, 4, 16, 4, padding=(1, 1), dilation=(2, 1), transposed=True
    ),
    "a single row": Case((3, 4, 1, 50), 4, (1, 5), 1, 1, 32, groups=4, padding=(0, 2)),
    "volume": Case((2, 3, 5, 9, 33), 10, (3, 3, 3), 8, 2, 32, 1, (1, 1, 1), (1, 1, 0), (1, 1, 1)),
    "volume, strides": Case(
        (2, 4, 9, 10, 18), 4, (3, 2, 3), 1, 2, 16, 4, (2, 1, 2), (2, 0, 1), (2, 1, 1)
    ),
    "volume, many channels": Case(
        (1, 30, 4, 34, 33), 3, (2, 3, 3), 4, 8, 32, 1, (1, 1, 1), (0, 1, 1), (1, 1, 1)
    ),
    "volume, turned round": Case(
        (2, 5, 4, 9, 17), 4, (3, 3, 2), 4, 2, 16, 1, (1, 1, 1), (1, 1, 0), (2, 1, 1), True
    ),
}
DEPTHWISE = {
    "planes": Case((2, 6, 20, 37), 6, (3, 3), 1, 8, 0, 6, padding=(1, 1)),
    "planes, two each": Case((1, 3, 18, 14), 6, (3, 3), 1, 2, 0, 3, padding=(1, 1)),
    "planes, strides": Case((3, 5, 23, 31), 5, (5, 3), 1, 4, 0, 5, (2, 3), (2, 1), (1, 2)),
    "planes, small": Case((40, 7, 3, 3), 7, (3, 3), 1, 2, 0, 7, padding=(1, 1)),
    "planes, row": Case((3, 4, 1, 50), 4, (1, 5), 1, 1, 0, 4, padding=(0, 2)),
    "planes, dilation": Case((2, 3, 19, 15), 3, (3, 3), 1, 8, 0, 3, (1, 1), (2, 4), (2, 4)),
    "planes, turned round": Case(
        (2, 4, 9, 17), 4, (3, 3), 1, 4, 0, 4, padding=(1, 1), dilation=(2, 1), transposed=True
    ),
    "planes, gathered": Case(
        (2, 4, 9, 11), 4, (3, 3), 1, 4, 0, 4, (2, 2), (1, 1), (1, 1), transposed=True
    ),
    "planes, gathered, two each": Case(
        (2, 3, 7, 10), 6, (4, 5), 1, 2, 0, 3, (3, 2), (0, 1), (1, 3), transposed=True
    ),
    "planes, gathered, small": Case(
        (2, 3, 5, 4), 3, (2, 3), 1, 1, 0, 3, (4, 1), (3, 2), (1, 1), transposed=True
    ),
    "planes, one channel": Case((2, 1, 13, 12), 5, (3, 2), 1, 2, 0, 1, (2, 1), (1, 0)),
}
CASES |= DEPTHWISE
SLIDING = {name: case for name, case in DEPTHWISE.items() if not case.transposed}
STRIPS = (1, 4, 14)  # rows of a thread in weight gradients


@functools.cache
def library() -> ctypes.CDLL:
    entries = [
        rf"""
extern "C" int direct_{at}_{terms}(const fw::ConvInput* x, const fw::ConvFilter* filter,
                                   const fw::ConvolutionSizes* sizes, float* out) {{
  memset(emulated_shared, 0xff, sizeof(emulated_shared));  // NaN
  const int64_t plane = int64_t(sizes->z.out) * sizes->y.out * sizes->x.out;
  const Plain plain{{out, sizes->images * plane, plane, sizes->groups * sizes->channels_out}};
  const Epilogue end{{{{{{plain}}}}}};
  return fw::{case.call(terms)}(end, *x, *filter, *sizes, 0, nullptr);
}}"""
        for at, case in enumerate(CASES.values())
        for terms in (1, 3)
    ]
    entries += [
        rf"""
extern "C" int gradient_{at}_{rows}(const fw::ConvInput* x, const fw::ConvInput* dy,
                             const fw::DepthwiseGradient* dw, const fw::ConvolutionSizes* sizes,
                             int parts, float* workspace) {{
  return fw::depthwise_gradient<{case.taps}, {rows}>(*x, *dy, *dw, *sizes, parts, workspace, 0,
                                                 nullptr);
}}"""
        for at, case in enumerate(CASES.values())
        for rows in STRIPS
        if case in SLIDING.values()
    ]
    body = CONVOLUTION_BODY[: CONVOLUTION_BODY.index("#define ENTRY")]
    return library_of("convolution/depthwise_weight_gradient.cuh", body, *entries)


def exact(case: Case, x: Tensor, w: Tensor) -> Tensor:
    flat = (
        (F.conv_transpose2d, F.conv2d) if len(case.kernel) == 2 else (F.conv_transpose3d, F.conv3d)
    )
    run = flat[0] if case.transposed else flat[1]
    more = {"dilation": case.dilation, "groups": case.groups}
    return run(x.double(), w.double(), None, case.stride, case.padding, **more)


def run(name: str, x: Tensor, w: Tensor, terms: int = 3) -> Tensor:
    """By the kernel; every output must be visited once."""
    case = CASES[name]
    like = exact(case, x, w)
    out = torch.full(like.shape, UNSEEN)
    per_group = w.shape[0] // case.groups * w.stride(0)
    outer, inner, *rest = five_strides(w)
    strides = (per_group, outer, inner, *rest)
    if case.transposed:
        strides = (per_group, inner, outer, *rest)
    sizes = sizes_of(case, x, w, like)
    code = getattr(library(), f"direct_{list(CASES).index(name)}_{terms}")(
        ctypes.byref(Strided(x.data_ptr(), five_strides(x))),
        ctypes.byref(Filter(w.data_ptr(), (ctypes.c_int64 * 6)(*strides))),
        ctypes.byref(sizes),
        ctypes.c_void_p(out.data_ptr()),
    )
    assert code == 0 and not (out == UNSEEN).any()
    return out


def sizes_of(case: Case, x: Tensor, w: Tensor, like: Tensor) -> Sizes:
    results, channels = (size // case.groups for size in (w.shape[0], w.shape[1] * case.groups))
    if case.transposed:
        results, channels = channels, results
    axes = [
        (ctypes.c_int * 7)(
            x.shape[2 + at],
            like.shape[2 + at],
            case.kernel[at],
            case.stride[at],
            case.dilation[at],
            case.padding[at],
        )
        for at in range(len(case.kernel))
    ]
    counts = (ctypes.c_int * 3)(case.groups, channels, results)
    single = [(ctypes.c_int * 7)(1, 1, 1, 1, 1, 0)] * (3 - len(axes))
    return Sizes(x.shape[0], counts, *single, *axes, like.shape[-1], case.transposed)


def operands(case: Case) -> tuple[Tensor, Tensor]:
    channels = case.images[1] // case.groups
    x = torch.randn(case.images)
    if case.transposed:
        return x, torch.randn(case.images[1], case.results // case.groups, *case.kernel)
    return x, torch.randn(case.results, channels, *case.kernel)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_convolutions(name: str) -> None:
    x, w = operands(CASES[name])
    y, truth = run(name, x, w), exact(CASES[name], x, w)
    case = CASES[name]
    terms = case.images[1] // case.groups * math.prod(case.kernel)
    assert float((y - truth).norm() / truth.norm()) < 1e-7 + 2e-8 * terms**0.5


@pytest.mark.parametrize(("parts", "rows"), [*zip((3, 1, 50), STRIPS, strict=True)])
@pytest.mark.parametrize("name", SLIDING)
def test_weight_gradients(name: str, parts: int, rows: int) -> None:
    """Some parts may be empty. Memory between the weights stays unchanged."""
    case = SLIDING[name]
    x, w = operands(case)
    exactly = w.double().requires_grad_()
    like = exact(case, x, exactly)
    dy = torch.randn(like.shape)
    (truth,) = torch.autograd.grad(like, exactly, dy.double())
    room = torch.full((*w.shape[:-1], w.shape[-1] + 2), UNSEEN)
    dw, workspace = room[..., 1:-1], torch.full((parts * w.numel(),), torch.nan)
    code = getattr(library(), f"gradient_{list(CASES).index(name)}_{rows}")(
        ctypes.byref(Strided(x.data_ptr(), five_strides(x))),
        ctypes.byref(Strided(dy.data_ptr(), five_strides(dy))),
        ctypes.byref(Strided(dw.data_ptr(), five_strides(dw))),
        ctypes.byref(sizes_of(case, x, w, like.detach())),
        parts,
        ctypes.c_void_p(workspace.data_ptr()),
    )
    assert code == 0 and float((dw - truth).norm() / truth.norm()) < 4e-7
    assert (room[..., 0] == UNSEEN).all() and (room[..., -1] == UNSEEN).all()


@pytest.mark.parametrize(
    "name", ["groups of four", "7x7, stride 2", "turned round", "volume", *DEPTHWISE]
)
def test_operands_are_rounded_to_tf32_as_cudnn_does(name: str) -> None:
    """With TF32 allowed: operands are rounded to nearest, ties away from zero."""
    x, w = operands(CASES[name])
    rounded = [((each.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for each in (x, w)]
    y, truth = run(name, x, w, terms=1), exact(CASES[name], *rounded)
    assert float((y - truth).norm() / truth.norm()) < 4e-7
    far = float((y - exact(CASES[name], x, w)).norm() / truth.norm())
    assert 5e-5 < far < 6e-4


def test_any_layout_of_rows_and_weights() -> None:
    x, w = operands(CASES["few channels"])
    room = torch.full((2, 5, 25, 45), torch.nan)
    sliced = room[:, 1:4, 2:23, 3:43].copy_(x)
    turned = w.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(run("few channels", sliced, turned), run("few channels", x, w))


def test_infinity_and_nan_are_where_they_belong() -> None:
    name = "few channels"
    x, w = operands(CASES[name])
    x[0, 1, 5, 5], x[1, 2, 0, 0], w[3, 0, 1, 1] = torch.inf, torch.nan, -torch.inf
    truth = exact(CASES[name], x, w).float()
    for y in (run(name, x, w), run(name, x, w, terms=1)):
        assert torch.equal(y.isnan(), truth.isnan()) and torch.equal(y.isinf(), truth.isinf())


def geometry(
    size: int, channels: int, results: int, taps: int = 3, groups: int = 1, stride: int = 1
) -> Geometry:
    axis = ConvAxis(size, -(-size // stride), taps, stride, 1, taps // 2)
    return Geometry(Dim(32), groups, channels, results, axis, axis)


def test_which_convolutions_are_direct() -> None:
    def direct(*args: int) -> bool:
        return prefers_direct(geometry(*args), {}, CUDA)

    assert direct(56, 1, 1, 3, 128) and direct(56, 4, 4, 3, 32) and direct(224, 3, 64)
    assert not direct(56, 64, 64) and not direct(56, 32, 32, 7) and not direct(14, 256, 256)


def test_few_tiles_leave_processors_idle() -> None:
    """A single image takes far longer than its share of a full wave."""
    of = geometry(28, 3, 64)
    one, wave = (direct_us(replace(of, images=Dim(n)), {}, CUDA) for n in (1, 132))
    assert one is not None and wave is not None and one >= 0.4 * wave
    assert not fits(geometry(56, 32, 64, 3, 1, 2)) and not fits(geometry(14, 96, 192, 1))


def test_the_chosen_tile_must_fit_too() -> None:
    line = ConvAxis(1, 1, 1, 1, 1, 0)
    of = Geometry(Dim(4), 8, 2, 5, line, ConvAxis(4000, 250, 3, 16, 1, 0))
    assert fits(of) and not fits(of, DirectSchedule(8, 8, 32))


def tile_of(*args: int, images: int = 32) -> DirectSchedule:
    return best_tile(replace(geometry(*args), images=Dim(images)), {}, CUDA)


def test_tiles_waste_little() -> None:
    assert tile_of(224, 3, 64) == DirectSchedule(8, 8, 32)
    assert tile_of(7, 4, 3).outs == 4 and tile_of(7, 4, 3).rows == 1
    wide = tile_of(224, 3, 64, 7, 1, 2)
    assert wide.outs == 8 and wide.rows * wide.across < 256, "all three channels find room"


def test_all_processors_have_tiles() -> None:
    """With few images, a thread takes fewer rows."""
    many, few = tile_of(224, 3, 32, 3, 1, 2, images=64), tile_of(224, 3, 32, 3, 1, 2, images=8)
    assert few.rows < many.rows
    assert tile_of(56, 1, 1, 3, 128) == DirectSchedule(1, 8, 0)
    assert tile_of(7, 1, 1, 3, 64, images=4) == DirectSchedule(1, 1, 0)


def test_what_does_not_fit() -> None:
    assert not fits(geometry(56, 512, 512)) and direct_us(geometry(56, 512, 512), {}, CUDA) is None
    assert not fits(geometry(56, 3, 64, 9))
    axis = ConvAxis(32, 64, 4, 2, 1, 1, transposed=True)
    assert not fits(Geometry(Dim(2), 8, 2, 2, axis, axis)), (
        "results are between the elements that are read"
    )
    assert fits(Geometry(Dim(2), 8, 1, 1, axis, axis))
    far = replace(axis, stride=5)
    assert not fits(Geometry(Dim(2), 8, 1, 1, far, far)), "a thread has all of a stride"
