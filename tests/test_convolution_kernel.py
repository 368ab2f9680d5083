"""A convolution as an entry asks for it, run without a GPU: weights split, taps laid out.

test_window_kernel.py looks at the kernel itself, with weights and taps that Python lays out.
"""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ir import Dim
from fusewright.window import Geometry, WindowAxis
from fusewright.window_cost import best_band
from tests.cores_on_host import library_of
from tests.test_window_kernel import BODY as WINDOW_BODY

BODY = (
    WINDOW_BODY[: WINDOW_BODY.index("#define ENTRY")]
    + r"""
#define ENTRY(name, channels)                                                                   \
  extern "C" int name(const fw::WindowInput* x, const fw::WindowFilter* filter,                 \
                      const fw::ConvolutionSizes* sizes, int64_t terms, void* workspace,        \
                      float* out) {                                                             \
    const int64_t plane = sizes->y.out * sizes->x.out;                                          \
    const Plain plain{out, sizes->images * plane, plane, sizes->groups * sizes->channels_out};  \
    const auto run = terms == 1 ? fw::convolution<1, channels, End>                             \
                                : fw::convolution<3, channels, End>;                            \
    return run(End{{{plain}}}, false, *x, *filter, *sizes, workspace, 0, nullptr);              \
  }
ENTRY(convolution_64, 64)
ENTRY(convolution_128, 128)
"""
)


class Strided(ctypes.Structure):
    """WindowInput and WindowFilter."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 4))


class Sizes(ctypes.Structure):
    _fields_ = (
        ("images", ctypes.c_int64),
        ("counts", ctypes.c_int * 3),  # groups, channels in and out of a group
        ("y", ctypes.c_int * 6),
        ("x", ctypes.c_int * 6),
        ("band_width", ctypes.c_int),
    )


@functools.cache
def library() -> ctypes.CDLL:
    return library_of("sm90_convolution.cuh", BODY)


def axis_of(size: int, taps: int, stride: int, dilation: int, before: int) -> WindowAxis:
    result = (size + 2 * before - dilation * (taps - 1) - 1) // stride + 1
    return WindowAxis(size, result, taps, stride, dilation, before)


def numbers(axis: WindowAxis) -> ctypes.Array[ctypes.c_int]:
    given = (axis.size, axis.result, axis.taps, axis.stride, axis.dilation, axis.before)
    return (ctypes.c_int * 6)(*given)


def convolved(
    x: Tensor,
    w: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    terms: int,
) -> Tensor:
    """As an entry of the heuristic's schedule does it; w may have any strides."""
    y, across = (
        axis_of(x.shape[2 + at], w.shape[2 + at], stride[at], dilation[at], padding[at])
        for at in range(2)
    )
    of = Geometry(Dim(x.shape[0]), groups, w.shape[1], w.shape[0] // groups, y, across)
    band = best_band(of)
    assert band is not None
    sizes = Sizes(x.shape[0], (ctypes.c_int * 3)(groups, of.channels, of.results))
    sizes.y, sizes.x, sizes.band_width = numbers(y), numbers(across), band
    source = Strided(x.data_ptr(), (ctypes.c_int64 * 4)(*x.stride()))
    filter_ = Strided(w.data_ptr(), (ctypes.c_int64 * 4)(*w.stride()))
    out = torch.full((x.shape[0], w.shape[0], y.result, across.result), 12345.0)
    workspace = torch.full((of.workspace_bytes + 256,), 0xFF, dtype=torch.uint8)
    skip = -workspace.data_ptr() % 128
    entry = getattr(library(), "convolution_64" if of.results <= 64 else "convolution_128")
    parts = [ctypes.byref(each) for each in (source, filter_, sizes)]
    pointers = [ctypes.c_void_p(workspace.data_ptr() + skip), ctypes.c_void_p(out.data_ptr())]
    assert entry(*parts, ctypes.c_int64(terms), *pointers) == 0
    assert not (out == 12345).any()
    assert (workspace[skip + of.workspace_bytes :] == 0xFF).all(), "beyond the workspace"
    return out


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize(
    ("shape", "filter_", "stride", "padding", "dilation", "groups"),
    [
        ((2, 5, 9, 11), (6, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1),
        ((1, 70, 8, 8), (10, 70, 3, 2), (2, 1), (0, 1), (1, 2), 1),
        ((2, 6, 12, 13), (8, 3, 5, 4), (3, 2), (2, 2), (1, 1), 2),
        ((1, 3, 16, 16), (70, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    ],
)
def test_weights_and_taps(  # type: ignore[no-untyped-def]
    shape, filter_, stride, padding, dilation, groups, terms: int
) -> None:
    torch.manual_seed(sum(shape))
    x, w = torch.randn(shape), torch.randn(filter_)
    w *= torch.exp2(torch.randint(-30, 30, (filter_[0], 1, 1, 1)).float())
    exact = F.conv2d(x.double(), w.double(), None, stride, padding, dilation, groups)
    y = convolved(x, w, stride, padding, dilation, groups, terms)
    wrong, right = (each.transpose(0, 1).flatten(1).norm(dim=1) for each in (y - exact, exact))
    assert float((wrong / right).max()) < (4e-7 if terms == 3 else 8e-4)


@pytest.mark.parametrize("terms", [1, 3])
def test_the_gradient_reads_the_weights_backwards(terms: int) -> None:
    """dx is a convolution of dy with swapped channels and flipped taps: negative strides."""
    dy, w = torch.randn(2, 6, 7, 9), torch.randn(6, 5, 3, 2)
    exact = torch.nn.grad.conv2d_input((2, 5, 9, 10), w.double(), dy.double())
    out, channel, y, x = w.stride()

    class Backwards:
        """A view that PyTorch has not: steps back along y and x."""

        shape = (5, 6, 3, 2)

        def stride(self) -> tuple[int, ...]:
            return (channel, out, -y, -x)

        def data_ptr(self) -> int:
            return w.data_ptr() + 4 * (2 * y + 1 * x)

    found = convolved(dy, Backwards(), (1, 1), (2, 1), (1, 1), 1, terms)  # type: ignore[arg-type]
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < (4e-7 if terms == 3 else 8e-4)
