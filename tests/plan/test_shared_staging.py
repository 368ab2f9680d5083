"""Both gradients of a convolution from the same lines: which have them, and what comes out."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen import weight_gradient as gradient
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.cost.conv_staged import with_shared_lines
from fusewright.cost.convolution import prefers_shared
from fusewright.ir.convolution import Geometry, by_eight
from fusewright.ir.graph import Dim
from fusewright.plan.steps import Loop, Step, Window, WindowGradient
from fusewright.rewrite import convolutions as windows
from fusewright.runtime import tensor_cores
from fusewright.target.target import Target
from tests.codegen.test_cuda_loops import emulated
from tests.kernels.test_convolution import axis_of
from tests.plan.test_plan import Lambda
from tests.support import nvcc
from tests.support.emulated_modules import (
    as_exact_as_eager,
    gradients_alone,
    on_library,
    share_lines,
)

STUB = Path(__file__).parents[1] / "support" / "convolution_on_host.cuh"
CUDA = Target.cuda()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    share_lines(monkeypatch)


def prepared(model: nn.Module, *inputs: Tensor, target: Target = CUDA) -> Prepared:
    given = tuple(each.requires_grad_() for each in inputs)
    return prepare(model, given, modes=("train",), device=torch.device("cpu"), target=target)


def backward(found: Prepared) -> tuple[Step, ...]:
    plan = found.modes[0].backward
    assert plan is not None
    return plan.steps


class Ended(nn.Module):
    """A convolution with a bias, and what follows it point by point."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(ins, outs, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(outs, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.clamp(self.convolve(x), max=0.5) + self.shift) * 2.0


# Which share ------------------------------------------------------------------------------------


def test_both_gradients_read_what_one_lays_out() -> None:
    """At a usual size, by the cost model. The loop that sums what the bias needs writes no more
    than that: both compute the rest on their way."""
    steps = backward(prepared(Ended(64, 128), torch.randn(64, 64, 56, 56)))
    (loop,) = (step for step in steps if isinstance(step, Loop) and step.kernel.inner)
    (window,) = (step for step in steps if isinstance(step, Window))
    (weights,) = (step for step in steps if isinstance(step, WindowGradient))
    assert window.kernel.prologue is not None
    assert weights.kernel.prologue == window.kernel.prologue
    assert weights.kernel.back is not None and weights.kernel.back.lines == window.kernel.lines
    assert window.outputs[-1] == window.kernel.lines and window.kernel.lines in weights.inputs
    changes = [each for each in loop.outputs if each in (*window.inputs, *weights.inputs)]
    assert not changes


def test_small_images_only_beside_the_gradient_by_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, PyTorch's is faster by the weights of many channels and few positions."""
    weight, x = torch.randn(512, 512, 3, 3), torch.randn(64, 512, 7, 7)
    beside = Lambda(lambda m, x: F.conv2d(x, m.weight, padding=1), weight=weight)
    alone = Lambda(lambda m, x: F.conv2d(x.detach(), m.weight, padding=1), weight=weight)
    (found,) = (s for s in backward(prepared(beside, x)) if isinstance(s, WindowGradient))
    assert found.kernel.back is not None
    assert not any(isinstance(step, WindowGradient) for step in backward(prepared(alone, x)))
    monkeypatch.setattr(windows, "is_worthwhile", lambda *_: False)  # by the source it is PyTorch's
    assert not any(isinstance(step, WindowGradient) for step in backward(prepared(beside, x)))


def test_each_is_computed_when_its_turn_comes() -> None:
    """Not all that lay out lines first: those of a whole network would be in memory at once."""
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.SiLU()) for _ in "123"]
    steps = backward(prepared(nn.Sequential(*layers), torch.randn(64, 64, 56, 56)))
    kinds = [type(step) for step in steps if isinstance(step, Window | WindowGradient)]
    assert kinds == [Window, WindowGradient] * 3


def twice(m: nn.Module, x: Tensor) -> Tensor:
    left, right = torch.relu(x), torch.sigmoid(x)
    weight, second = m.weight, m.second
    return F.conv2d(left, weight, padding=1) * F.conv2d(right, second, padding=1)  # type: ignore[arg-type]


def test_a_loop_of_two_sources_is_gone_with_both() -> None:
    model = Lambda(twice, weight=torch.randn(128, 64, 3, 3), second=torch.randn(128, 64, 3, 3))
    plan = prepared(model, torch.randn(32, 64, 56, 56)).modes[0].inference
    assert not any(isinstance(step, Loop) and not step.outputs for step in plan.steps)
    assert sum(isinstance(step, Window) and step.kernel.prologue is not None for step in plan.steps)


def test_not_without_tf32() -> None:
    target = Target.cuda(computing=False)
    steps = backward(prepared(Ended(64, 128), torch.randn(64, 64, 56, 56), target=target))
    assert not any(step.kernel.lines for step in steps if isinstance(step, Window))
    assert not any(step.kernel.back for step in steps if isinstance(step, WindowGradient))


def sizes(ins: int, outs: int, size: int, taps: int = 3, images: int = 32) -> Geometry:
    axis = axis_of(size, taps, 1, 1, taps // 2)
    return Geometry(Dim(images), 1, ins, outs, axis, axis)


def test_few_channels_do_not_share() -> None:
    """The library rounds nothing there."""
    for ins, outs in ((16, 64), (64, 16)):
        of = sizes(ins, outs, 56)
        assert not prefers_shared(of, of.turned_back, {})
    of = sizes(64, 64, 112)
    assert prefers_shared(of, of.turned_back, {})


def test_rows_lie_equally_far_apart() -> None:
    of = sizes(64, 64, 30, 5)
    ours, theirs = with_shared_lines(of, of.turned_back)
    assert ours.x.extent == theirs.x.extent == by_eight(theirs).x.extent == 32
    assert ours.y.extent == theirs.y.extent == 32


# What comes out ---------------------------------------------------------------------------------


class Chain(nn.Module):
    """Strides, groups and one axis; the loops between are pointwise, or sum for a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2, bias=False)
        self.third = nn.Conv1d(12, 10, 5, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(x))))
        return torch.tanh(self.third(torch.sigmoid(hidden).flatten(2)))


class Together(nn.Module):
    """One source of two convolutions, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 5, 3), nn.Conv2d(6, 5, 3, dilation=2, padding=1)
        self.again = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.silu(self.first(x) + self.second(x))
        return self.again(torch.exp(-(self.again(hidden) ** 2)))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv3d(3, 5, (2, 3, 3), padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolve(x.unflatten(1, (3, 2))))


KINDS = (Chain, Together, Volumes)


def on_host(monkeypatch: pytest.MonkeyPatch, terms: int = 1) -> None:
    for module, name in (
        (rendering, "WINDOW_HEADER"),
        (gradient, "HEADER"),
        (gradient, "LINE_HEADER"),
    ):
        monkeypatch.setattr(module, name, str(STUB))
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", terms == 1)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("always", "asked")
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_as_exact_as_eager(
    kind: type[nn.Module], terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(monkeypatch, terms)
    torch.manual_seed(3)
    model, x = kind(), torch.randn(3, 6, 10, 8)
    found = prepared(model, x)
    gradients = [s.kernel for s in backward(found) if isinstance(s, WindowGradient)]
    assert gradients and all(each.back for each in gradients)
    fast = on_library(model, x, found, emulated(found.source))
    for given in (x, torch.randn(5, 6, 10, 8)):
        as_exact_as_eager(fast, copy.deepcopy(model), given.detach(), 2e-6)


@pytest.mark.usefixtures("always", "asked")
@pytest.mark.parametrize("wanted", ["input", "weights"])
def test_one_of_them_alone(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other's result; lines are left for whom they are of use."""
    on_host(monkeypatch)
    torch.manual_seed(3)
    model, x = Ended(6, 8), torch.randn(3, 6, 9, 8)
    found = prepared(model, x)
    fast = on_library(model, x, found, emulated(found.source))
    for ours, eager in gradients_alone(fast, model, x, wanted):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@nvcc.needed
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("terms", [1, 3])
def test_the_source_is_accepted(terms: int, tmp_path: Path) -> None:
    found = prepared(Chain(), torch.randn(3, 6, 10, 8))
    nvcc.read(f"#define FW_CONVOLUTIONS {terms}\n{found.source.text}", tmp_path)
