"""Modules with depthwise convolutions: what is planned, and the kernels by emulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen.source import Source
from fusewright.cost.conv_direct import (
    depthwise_gradient_parts,
    depthwise_gradient_rows,
    has_depthwise_gradient,
)
from fusewright.cost.convolution import is_worthwhile
from fusewright.ir.convolution import ConvAxis, Geometry
from fusewright.ir.graph import Dim
from fusewright.rewrite import convolutions
from fusewright.runtime import tensor_cores
from fusewright.target.target import Target
from tests.support.emulated_modules import as_exact_as_eager, on_library
from tests.support.plans import prepared_for_training, steps_of
from tests.support.tensor_cores_on_host import on_host, with_stand_in

CUDA = Target.cuda()


class Separable(nn.Module):
    """With a stride, with dilation and two results a channel, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 6, 5, stride=2, padding=2, groups=6)
        self.apart = nn.Conv2d(6, 12, (3, 1), padding=(2, 0), dilation=(2, 1), groups=6)
        self.up = nn.ConvTranspose2d(12, 12, 4, stride=2, padding=1, groups=12)
        self.scale = nn.Parameter(torch.rand(12, 1, 1))
        self.scale_in = nn.Parameter(torch.rand(12, 1, 1))  # names that a kernel could mix up

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.same(x)))
        y = self.apart(torch.sigmoid(self.down(y))) * self.scale + self.scale_in
        return torch.tanh(self.up(y))


@pytest.mark.usefixtures("asked")
def test_all_passes_are_depthwise_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of small convolutions, as far as cost decides."""
    monkeypatch.setattr(convolutions, "is_worthwhile", lambda *_: True)
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model, x = Separable(), torch.randn(3, 6, 14, 18)
    found = prepared_for_training(model, x)
    mode = found.modes[0]
    assert len(steps_of(mode.forward, "convolution")) == 4 and not steps_of(mode.forward, "call")
    assert not steps_of(mode.backward, "call")
    assert (
        len(steps_of(mode.backward, "convolution"))
        == len(steps_of(mode.backward, "weight_gradient"))
        == 4
    )
    assert "depthwise_convolution<FW" in found.source.text
    source = Source("host", on_host(found.source.text), found.source.entries)
    as_exact_as_eager(on_library(model, x, found, source), model, x, 2e-6)


def test_which_depthwise_convolutions_are_worthwhile() -> None:
    """At the sizes of image networks all passes are. There are as many parts as processors need."""
    axis = ConvAxis(56, 28, 3, 2, 1, 1)
    back = ConvAxis(28, 56, 3, 2, 1, 1, transposed=True)
    of = Geometry(Dim(16), 96, 1, 1, axis, axis)
    assert is_worthwhile(of, {}, CUDA, True) and has_depthwise_gradient(of)
    assert is_worthwhile(Geometry(Dim(16), 96, 1, 1, back, back), {}, CUDA, True)
    assert depthwise_gradient_parts(of, {}, CUDA) == 6
    assert depthwise_gradient_parts(Geometry(Dim(1), 4, 1, 1, axis, axis), {}, CUDA) == 1
    assert not has_depthwise_gradient(Geometry(Dim(16), 48, 2, 2, axis, axis))


@pytest.mark.parametrize(
    ("size", "rows"),
    [(1, 1), (3, 3), (13, 13), (32, 8), (53, 13), (55, 11), (56, 14), (57, 14)],
)
def test_strips_divide_rows_with_few_left_over(size: int, rows: int) -> None:
    axis = ConvAxis(size, size, 3, 1, 1, 1)
    assert depthwise_gradient_rows(Geometry(Dim(2), 8, 1, 1, axis, axis)) == rows


def test_all_parts_have_strips() -> None:
    axis = ConvAxis(112, 112, 3, 1, 1, 1)
    of = Geometry(Dim(8), 32, 1, 1, axis, axis)  # 64 strips; 33 parts were wanted
    assert depthwise_gradient_parts(of, {}, CUDA) == 32
