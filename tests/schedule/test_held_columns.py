"""Sweeps over columns that stay in registers: softmax and norms over the channels of images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.loop_kernels import access, kernel
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.ir.loop import Apply, Load, LoopKernel, Reduce, Store
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from fusewright.tune.candidates import worth_trying
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import as_exact_as_eager, on_library
from tests.support.models import OverChannels

CUDA = Target.cuda()


def prepared(model: nn.Module, x: Tensor) -> Prepared:
    return prepare(model, (x,), modes=("train",), device=torch.device("cpu"), target=CUDA)


@pytest.mark.sample(3)
@pytest.mark.parametrize("width", [60, 61])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_over_channels_are_as_exact_as_eager(width: int, dtype: torch.dtype) -> None:
    """Channels that divide among threads and that do not; pairs of columns, and single ones."""
    torch.manual_seed(width)
    model = OverChannels(40, 64, 17).to(dtype)
    x = torch.randn(2, 64, 40, width).to(dtype)
    found = prepared(model, x)
    assert found.source.text.count("return fw::held_column<") >= 6
    fast = on_library(model, x, found, emulated(found.source))
    as_exact_as_eager(fast, model, x, 2e-6 if dtype == torch.float32 else 2e-2)


def steps(of: Callable[[Tensor], Tensor], shape: tuple[int, ...], target: Target = CUDA) -> int:
    class Of(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return of(x)

    device = torch.device("cpu")
    found = prepare(Of(), (torch.randn(shape),), modes=("eval",), device=device, target=target)
    return len(found.modes[0].inference.steps)


def test_columns_are_read_once_where_they_fit() -> None:
    assert steps(lambda x: x.softmax(1), (4, 64, 64, 64)) == 1
    assert steps(lambda x: x.softmax(1), (4, 512, 64, 64)) == 1
    assert steps(lambda x: x.softmax(1), (4, 2000, 64, 64)) == 3, "more than registers hold"
    assert steps(lambda x: x.softmax(1), (4, 64, 10, 10)) > 1, "400 columns for 132 processors"
    assert steps(lambda x: x.softmax(1), (4, 64, 64, 64), Target.host()) > 1
    assert steps(lambda x: x.softmax(3), (4, 64, 64, 64)) == 1, "rows, as ever"


def centred() -> LoopKernel:
    body = [
        Load("x", "float32", access("x", 64 * 8192, 1, 8192)),
        Reduce("s", "float32", "sum", "x"),
        Apply("y", "float32", "sub", ("x", "s")),
        Store("y", "float32", access("y", 64 * 8192, 1, 8192)),
    ]
    return kernel("centred", [4, 8192], [64], {"x": "float32"}, {"y": "float32"}, body)


def test_which_schedules_are_legal() -> None:
    loop = centred()
    assert choose(loop, CUDA, {}) == Schedule("column", 2, 256, unroll=8, cached=True)
    assert legal(loop, Schedule("column", 2, 512, unroll=4, cached=True), CUDA)
    assert not legal(loop, Schedule("column", 2, 256, unroll=4, cached=True), CUDA), "half of it"
    assert not legal(loop, Schedule("column", 2, 32, unroll=64, cached=True), CUDA), "registers"
    assert not legal(loop, Schedule("column", 2, 256, unroll=8), CUDA), "it would be read once"
    assert not legal(loop, Schedule("column", 2, 256, across=0, unroll=8, cached=True), CUDA)


def test_which_schedules_are_tried() -> None:
    """Other numbers of threads hold other shares of a column, and all of it together."""
    tried = [each for each in worth_trying(centred(), CUDA, {}) if isinstance(each, Schedule)]
    held = [each for each in tried if each.cached and each.kind == "column"]
    assert len(held) >= 5
    for each in held:
        assert each.threads // each.across * each.unroll < 2 * 64


def test_a_gradient_that_a_convolution_reads_is_staged() -> None:
    """PyTorch's gradient of the weights reads channels-last."""

    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(32, 64, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).softmax(1).sigmoid()

    text = prepared(Of(), torch.randn(2, 32, 16, 32, 32)).source.text
    assert "return fw::transpose_column<int, 2, " in text and "return fw::held_column<" in text
