"""Modules whose convolutions have a single channel in each group: what is planned, and the kernels
by emulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen.source import Source
from fusewright.cost.conv_direct import (
    has_plane_gradient,
    plane_gradient_parts,
    plane_gradient_rows,
)
from fusewright.cost.convolution import is_worthwhile
from fusewright.ir.convolution import Geometry, WindowAxis
from fusewright.ir.graph import Dim
from fusewright.plan.steps import Call, Window, WindowGradient
from fusewright.rewrite import convolutions as windows
from fusewright.runtime import tensor_cores
from tests.plan.test_volumes import prepared, steps
from tests.support.emulated_modules import as_exact_as_eager, on_library
from tests.support.tensor_cores_on_host import on_host, with_stand_in


class Separable(nn.Module):
    """Depthwise in all ways: with a stride, taps apart with two results each, and up again."""

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
def test_all_passes_go_plane_by_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, too, as far as worth is asked for."""
    monkeypatch.setattr(windows, "is_worthwhile", lambda *_: True)
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model, x = Separable(), torch.randn(3, 6, 14, 18)
    found = prepared(model, x)
    mode = found.modes[0]
    assert len(steps(mode.forward, Window)) == 4 and not steps(mode.forward, Call)
    assert not steps(mode.backward, Call)
    assert len(steps(mode.backward, Window)) == len(steps(mode.backward, WindowGradient)) == 4
    assert "plane_convolution<FW" in found.source.text
    source = Source("host", on_host(found.source.text), found.source.entries)
    as_exact_as_eager(on_library(model, x, found, source), model, x, 2e-6)


def test_which_are_worth_it() -> None:
    """At sizes of image networks all passes are; parts are as many as processors need."""
    axis = WindowAxis(56, 28, 3, 2, 1, 1)
    back = WindowAxis(28, 56, 3, 2, 1, 1, transposed=True)
    of = Geometry(Dim(16), 96, 1, 1, axis, axis)
    assert is_worthwhile(of, {}, True) and has_plane_gradient(of)
    assert is_worthwhile(Geometry(Dim(16), 96, 1, 1, back, back), {}, True)
    assert plane_gradient_parts(of, {}, 132) == 6
    assert plane_gradient_parts(Geometry(Dim(1), 4, 1, 1, axis, axis), {}, 132) == 1
    assert not has_plane_gradient(Geometry(Dim(16), 48, 2, 2, axis, axis))


@pytest.mark.parametrize(
    ("size", "rows"),
    [(1, 1), (3, 3), (13, 13), (32, 8), (53, 13), (55, 11), (56, 14), (57, 14)],
)
def test_strips_leave_few_rows(size: int, rows: int) -> None:
    axis = WindowAxis(size, size, 3, 1, 1, 1)
    assert plane_gradient_rows(Geometry(Dim(2), 8, 1, 1, axis, axis)) == rows


def test_all_parts_have_strips() -> None:
    axis = WindowAxis(112, 112, 3, 1, 1, 1)
    of = Geometry(Dim(8), 32, 1, 1, axis, axis)  # 64 strips; 33 parts were wanted
    assert plane_gradient_parts(of, {}, 132) == 32
