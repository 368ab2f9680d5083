"""Kernel templates are instantiated only for cases that can occur, and Python predicts these
cases."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.codegen.convolution import lanes_of_rows
from fusewright.compile.pipeline import prepare
from fusewright.cost.conv_tensor_core import band_widths, tap_counts
from fusewright.ir.convolution import ConvAxis, Geometry, by_eight
from fusewright.ir.graph import Dim
from fusewright.target.target import Target
from tests.support.convolution_entry_on_host import axis_of, sizes_of
from tests.support.convolution_on_host import BODY as CONVOLUTION_BODY
from tests.support.emulated_modules import use_tensor_cores
from tests.support.models import ParametricLambda
from tests.support.tensor_cores_on_host import library_of

BODY = (
    CONVOLUTION_BODY[: CONVOLUTION_BODY.index("#define ENTRY")]
    + r"""
extern "C" int by_lanes(const fw::ConvolutionSizes* sizes, int lanes, int as_staged) {
  fw::ConvShape shape{};
  fw::TapOrder order{};
  if (!fw::lay_out(*sizes, 4, as_staged, shape, order)) return -1;
  return fw::goes_by_lanes(shape, lanes);
}
extern "C" int taps_of(const fw::ConvolutionSizes* sizes) {
  fw::ConvShape shape{};
  fw::TapOrder order{};
  if (!fw::lay_out(*sizes, 1, false, shape, order)) return -1;
  const fw::GradientTiling of = fw::gradient_sizes(shape, 1, false, false);
  int found = 0;
  for (int at = 0; at < 2 * of.sets; ++at) {
    found |= 1 << fw::TapShare(of, of.set[at / 2].taps, at % 2).taps;
  }
  return found & ~1;
}
extern "C" int has_taps(const fw::ConvolutionSizes* sizes) {
  fw::ConvShape shape{};
  fw::TapOrder order{};
  if (!fw::lay_out(*sizes, 1, false, shape, order)) return -1;
  const fw::GradientTiling of = fw::gradient_sizes(shape, 1, false, false);
  return fw::has_all_taps<fw::TapCounts<1, 2>>(of) + 2 * fw::has_all_taps<fw::TapCounts<4, 5>>(of);
}
extern "C" int gradient(const fw::ConvInput* x, const fw::ConvInput* dy,
                        const fw::WeightGradient* dw, const fw::ConvolutionSizes* sizes) {
  return fw::weight_gradient<1, fw::TapCounts<4, 5>>(*x, *dy, *dw, *sizes, 1, nullptr, 0, nullptr);
}
extern "C" int convolution(const fw::ConvInput* x, const fw::ConvFilter* w,
                           const fw::ConvolutionSizes* sizes, void* workspace, int vectors) {
  const Plain plain{nullptr, sizes->y.out * sizes->x.out, sizes->y.out * sizes->x.out, 64};
  return fw::convolution<1, fw::ByTiles<64>, 2, true>(Epilogue{{{plain}}}, vectors, *x, *w, *sizes,
                                                      workspace, nullptr, 0, nullptr);
}
"""
)


MISALIGNED = 716


@functools.cache
def library() -> ctypes.CDLL:
    return library_of("sm90/gradient/sm90_staged_weight_gradient.cuh", BODY)


def geometries(transposed: bool) -> list[Geometry]:
    found = []
    for taps, stride, dilation in itertools.product((1, 2, 3, 4, 7), (1, 2, 3), (1, 2)):
        for size, before, results in ((9, 0, 64), (24, 1, 128), (230, taps // 2, 40)):
            axis = axis_of(size, taps, stride, dilation, before)
            if transposed:
                grown = (size - 1) * stride - 2 * before + dilation * (taps - 1) + 1
                axis = ConvAxis(size, grown, taps, stride, dilation, before, transposed=True)
            if axis.result > 0:
                found.append(Geometry(Dim(4), 1, 64, results, axis, axis))
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_which_rows_are_read_in_vectors(transposed: bool) -> None:
    """A kernel for vectors has no code for single elements."""
    seen = set()
    every = geometries(transposed)
    eight = [by_eight(of) for of in every if not of.x.transposed or of.x.stride == 2]
    for of in (*every, *eight):
        for band in (*band_widths(of), 12, 7):
            if not 0 < band <= of.x.positions:
                continue
            for lanes, as_staged in itertools.product((2, 4), (0, 1)):
                found = library().by_lanes(ctypes.byref(sizes_of(of, band)), lanes, as_staged)
                said = lanes_of_rows(of, band) % lanes == 0
                assert found in (-1, 0, 1) and (not said or found), (of, band, lanes, as_staged)
                seen.add((said, found))
    assert (True, 1) in seen and (False, 0) in seen


def test_how_many_taps_a_warpgroup_has() -> None:
    seen = set()
    for of in geometries(False):
        for results in (16, 64, 65, 256):
            here = replace(of, results=results)
            found = library().taps_of(ctypes.byref(sizes_of(here, here.x.result)))
            if found != -1:  # more taps than there is room for
                counts = tap_counts(here)
                assert found == sum(1 << each for each in counts), here
                seen.update(counts)
    assert seen == {1, 2, 3, 4, 5}


def test_a_case_without_an_instance_is_refused() -> None:
    """Nothing runs: neither one tap per warpgroup nor unaligned rows."""
    x, dy, dw = torch.zeros(1, 64, 8, 8), torch.zeros(1, 64, 8, 6), torch.zeros(64, 64, 1, 3)

    def strided(tensor: Tensor) -> ctypes.Array[ctypes.c_int64]:
        n, c, y, x = tensor.stride()
        return (ctypes.c_int64 * 6)(tensor.data_ptr(), n, c, 0, y, x)

    of = Geometry(Dim(1), 1, 64, 64, axis_of(8, 1, 1, 1, 0), axis_of(8, 3, 1, 1, 0))
    weights = (ctypes.c_int64 * 6)(dw.data_ptr(), 192, 3, 0, 3, 1)
    sizes = sizes_of(of, 6)
    assert library().has_taps(ctypes.byref(sizes)) == 1, "one and two, and no others"
    assert library().gradient(strided(x), strided(dy), weights, ctypes.byref(sizes)) == 1
    filter_ = (ctypes.c_int64 * 7)(dw.data_ptr(), 64 * 192, 192, 3, 0, 3, 1)
    memory = torch.empty(1 << 20)
    given = (strided(x), filter_, ctypes.byref(sizes), ctypes.c_void_p(memory.data_ptr()))
    assert library().convolution(*given, 0) == MISALIGNED


class Block(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.conv, self.residual = nn.Conv2d(64, 64, 3, padding=1), residual

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        return y + x if self.residual else y


@pytest.mark.parametrize("residual", [False, True])
def test_operands_of_an_epilogue_may_have_any_alignment(
    residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = re.findall(r"fw::convolution<([^;]*?)>\(\s*end", text_of(residual, False, monkeypatch))
    assert len(calls) == 3, "forward, inference and the input gradient"
    assert {each.endswith(", 4, true") for each in calls} == {not residual}


@pytest.mark.parametrize("last", [False, True])
def test_the_type_of_the_input_follows_its_layout(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(False, last, monkeypatch)
    # The weight gradient reads the input as it was given. PyTorch chooses the layout of results.
    gradient = text[text.rindex("FW_ENTRY(custom_convolution_gradient") :]
    kind = "Conv" if last else "Planar"
    assert f"const fw::{kind}Input source{{" in gradient
    assert last or "const fw::ConvInput source{s" not in text


def text_of(residual: bool, last: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    use_tensor_cores(monkeypatch)
    model, x = Block(residual), torch.randn(16, 64, 32, 32, requires_grad=True)
    layout = torch.channels_last if last else torch.contiguous_format
    model.to(memory_format=layout)  # type: ignore[call-overload]
    x = x.to(memory_format=layout)
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=Target.cuda())
    return found.source.text


def test_weight_gradients_of_few_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tensor_cores(monkeypatch)
    model = ParametricLambda(lambda m, x: F.conv2d(x, m.weight), weight=torch.randn(128, 64, 1, 1))
    x = torch.randn(64, 64, 56, 56)
    text = prepare(model, (x,), modes=("train",), device=x.device, target=Target.cuda()).source.text
    assert set(re.findall(r"fw::TapCounts<([^>]*)>", text)) == {"1"}
