"""The gradient of a convolution by its weights, run without a GPU: g++, fibers and stand-ins.

As in windows_on_host.py, every index, swizzle, shift, edge and phase of a barrier is the
kernel's own; nvcc's code, the memory model and how tensor cores round are not seen here.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.codegen.render import flattened
from fusewright.codegen.source import Source
from tests.codegen.test_matmul_modules import compiled
from tests.kernels.test_convolution import Sizes, Strided
from tests.support import nvcc
from tests.support.convolution_on_host import error, five_strides, rearranged
from tests.support.tensor_cores_on_host import host_library, on_host, with_stand_in

UNSEEN = 12345.0
GUARD = 16  # floats behind the workspace
BODY = r"""
#define ENTRY(terms)                                                                            \
  extern "C" int gradient_##terms(                                                              \
      const fw::WindowInput* x, const fw::WindowInput* dy, const fw::WindowGradient* dw,        \
      const fw::ConvolutionSizes* sizes, int parts, void* workspace) {                          \
    memset(emulated_shared, 0xff, sizeof(emulated_shared));  /* NaN */                          \
    return fw::window_gradient<terms>(*x, *dy, *dw, *sizes, parts, workspace, 0, nullptr);      \
  }
ENTRY(1)
ENTRY(3)
extern "C" int parts_of(const fw::ConvolutionSizes* sizes, int terms, int processors) {
  return fw::window_gradient_parts(*sizes, terms, processors);
}
extern "C" int64_t bytes_of(const fw::ConvolutionSizes* sizes, int parts) {
  return fw::window_gradient_bytes(*sizes, parts);
}
"""


# Products run once the converting warps have had time for the next slab: rows that are overwritten
# too soon come out wrong.
PROMPT = "  ++emulation::progress;\n  give_way();\n"
LATE = "  for (int turn = 0; turn < 32; ++turn) ++emulation::progress, give_way();\n"


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel's own text, its instructions replaced by the stand-ins."""
    text = on_host(
        "\n".join([*with_stand_in("sm90/gradient/sm90_weight_gradient.cuh", set()), BODY])
    )
    assert text.count(PROMPT) == 1
    built = host_library(text.replace(PROMPT, LATE))
    built.bytes_of.restype = ctypes.c_int64
    return built


@dataclass(frozen=True)
class Gradient:
    """A convolution and how the kernel is to go about its gradient."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    terms: int = 1
    band_width: int | None = None  # the whole width
    parts: int = 2
    mends: bool = False  # whether sums may have to be made anew

    def sizes(self, x: Tensor, dy: Tensor, kernel: tuple[int, ...]) -> Sizes:
        sizes = Sizes(x.shape[0])
        sizes.counts[:] = (self.groups, x.shape[1] // self.groups, dy.shape[1] // self.groups)
        sizes.z = (1, 1, 1, 1, 1, 0)
        for axis, name in enumerate("zyx"[-len(kernel) :]):
            known = (x.shape[2 + axis], dy.shape[2 + axis], kernel[axis])
            chosen = (self.stride[axis], self.dilation[axis], self.padding[axis])
            setattr(sizes, name, (ctypes.c_int * 7)(*known, *chosen))
        sizes.band_width = self.band_width or dy.shape[-1]
        return sizes

    def dy_shape(self, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
        out = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                x[2:], w[2:], self.stride, self.padding, self.dilation, strict=True
            )
        )
        return (x[0], w[0], *out)

    def exact(self, x: Tensor, dy: Tensor, w: tuple[int, ...]) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        by_weight = torch.nn.grad.conv2d_weight if len(w) == 4 else torch.nn.grad.conv3d_weight
        return by_weight(x.double(), w, dy.double(), *settings)

    def run(self, x: Tensor, dy: Tensor, dw: Tensor) -> Tensor:
        """By the kernel, into dw; every element and nothing behind the workspace is written.

        What is not finite is made anew, and would be right although the tensor cores' sums are not.
        """
        dw.fill_(UNSEEN)
        sizes = self.sizes(x, dy, tuple(dw.shape[2:]))
        size = library().bytes_of(ctypes.byref(sizes), self.parts) // 4
        workspace = torch.full((size + GUARD,), math.nan)
        workspace[size:] = UNSEEN
        code = getattr(library(), f"gradient_{self.terms}")(
            *(ctypes.byref(Strided(each.data_ptr(), five_strides(each))) for each in (x, dy, dw)),
            ctypes.byref(sizes),
            self.parts,
            ctypes.c_void_p(workspace.data_ptr()),
        )
        assert code == 0 and not (dw == UNSEEN).any() and (workspace[size:] == UNSEEN).all()
        assert self.mends or workspace.isfinite().all() or not dy.numel()
        return dw


def check(gradient: Gradient, x: Tensor, dy: Tensor, w: tuple[int, ...]) -> None:
    found = error(gradient.run(x, dy, torch.empty(w)), gradient.exact(x, dy, w))
    assert found < (6e-4 if gradient.terms == 1 else 4e-7)


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
def test_every_kind_of_window(name: str, terms: int) -> None:
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
    """The same bits each time; more parts than there are slabs of positions are no mistake."""
    w = (5, 4, 3, 3)
    x, dy = operands((3, 4, 10, 9), w, SAME)
    for parts in (1, 3, 17):
        gradient = replace(SAME, parts=parts, terms=terms)
        first, again = (gradient.run(x, dy, torch.empty(w)) for _ in range(2))
        assert torch.equal(first, again)
        assert error(first, gradient.exact(x, dy, w)) < (6e-4 if terms == 1 else 4e-7)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("powers", [(0, 30), (30, 0), (-60, 40), (-110, 10)])
def test_scales_that_jump(powers: tuple[int, int], terms: int) -> None:
    """From one image to the next but one, of x, of dy, and of both against each other.

    A slab has one scale for each operand; the zeros between keep it from holding rows of both.
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
    """Rows that a slab shares with the last one take on its scale."""
    w, gradient = (3, 4, 3, 3), replace(SAME, terms=terms, parts=1)
    x, dy = operands((4, 4, 12, 10), w, gradient)
    jump = torch.tensor((1, 2.0**power, 1, 2.0**power)).view(4, 1, 1, 1)
    check(gradient, x * jump, dy / jump, w)
    check(gradient, x / jump, dy * jump, w)


@pytest.mark.parametrize("terms", [1, 3])
def test_zeros(terms: int) -> None:
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
    """The gradient by its definition: what lies outside of x is zero, also where dy is Inf."""
    settings = (gradient.dilation, gradient.padding, gradient.stride)
    columns = F.unfold(x.double(), w[2:], *settings)
    return torch.einsum("nol,nkl->ok", dy.double().flatten(2), columns).view(w)


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("huge", [False, True])
def test_what_is_not_finite_is_where_it_belongs(huge: bool, terms: int) -> None:
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


def test_one_term_is_as_exact_as_halves() -> None:
    w = (8, 8, 3, 3)
    x, dy = operands((1, 8, 12, 12), w, SAME)
    found = error(SAME.run(x, dy, torch.empty(w)), SAME.exact(x, dy, w))
    assert 5e-5 < found < 6e-4


@pytest.mark.parametrize("images", [0, 1])
def test_nothing(images: int) -> None:
    """Without positions a gradient is zero; without channels there is none."""
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
    made = "template int fw::window_gradient<{}>(const fw::WindowInput&, const fw::WindowInput&,"
    made += " const fw::WindowGradient&, const fw::ConvolutionSizes&, int, void*, int, void*);"
    text = "\n".join([header, made.format(1), made.format(3)])
    compiled(Source("cuda", text, ()), tmp_path)
