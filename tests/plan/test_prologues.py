"""Loops before a convolution that it takes up: which it does, and what comes of it."""

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
from fusewright.ir.convolution import CHANNELS, WindowKernel, lies_along
from fusewright.plan import prologues
from fusewright.plan.steps import Loop, Window
from fusewright.runtime import tensor_cores
from fusewright.schedule.tensor_core import WindowSchedule, choose_window
from fusewright.target.target import Target
from fusewright.tune.search import source_of
from tests.codegen.test_cuda_loops import emulated
from tests.plan.test_plan import Lambda
from tests.support import nvcc
from tests.support.emulated_modules import INFERRED, on_library, put_on_cores

STUB = Path(__file__).parents[1] / "support" / "convolution_on_host.cuh"

CUDA = Target.cuda()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_cores(monkeypatch)
    monkeypatch.setattr(prologues, "prefers_computed", lambda *_: True)


def prepared(model: nn.Module, *inputs: Tensor) -> Prepared:
    device = torch.device("cpu")
    return prepare(model.eval(), inputs, modes=("eval",), device=device, target=CUDA)


def steps_of(model: nn.Module, *inputs: Tensor) -> tuple[list[Window], list[Loop]]:
    """Windows and loops of inference."""
    steps = prepared(model, *inputs).modes[0].inference.steps
    windows = [step for step in steps if isinstance(step, Window)]
    return windows, [step for step in steps if isinstance(step, Loop)]


def weights(*shapes: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    names = ("weight", "second", "third")
    return {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=False)}


# Which are taken up -----------------------------------------------------------------------------


def relu_first(m: nn.Module, x: Tensor) -> Tensor:
    return F.conv2d(torch.relu(x), m.weight, padding=1)  # type: ignore[arg-type]


def test_a_loop_before_a_convolution_is_part_of_it() -> None:
    """At a usual size, by the cost model; lines are what computes it."""
    x = torch.randn(64, 128, 28, 28)
    (window,), loops = steps_of(Lambda(relu_first, **weights((128, 128, 3, 3))), x)
    assert not loops and window.inputs == ("input_0", "weight")
    assert window.operators == ("relu", "convolution")
    schedule = choose_window(window.kernel, CUDA, {"s0": 64})
    assert isinstance(schedule, WindowSchedule) and schedule.line_positions


def test_without_tf32_it_stays_a_loop() -> None:
    """There are no lines then, and every tile would compute it anew."""
    model, x = Lambda(relu_first, **weights((128, 128, 3, 3))), torch.randn(64, 128, 28, 28)
    target = Target.cuda(computing=False)
    found = prepare(model, (x,), modes=("train",), device=x.device, target=target).modes[0]
    assert [type(step) for step in found.inference.steps] == [Loop, Window]


def test_what_backward_reads_is_written() -> None:
    model = Lambda(relu_first, **weights((128, 128, 3, 3)))
    x, device = torch.randn(64, 128, 28, 28), torch.device("cpu")
    found = prepare(model, (x,), modes=("train",), device=device, target=CUDA).modes[0]
    kernels = [step.kernel for step in found.forward.steps if isinstance(step, Window)]
    assert [kernel.prologue for kernel in kernels] == [None]


def read_twice(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(x)
    return F.conv2d(hidden, m.weight), F.conv2d(hidden, m.second)  # type: ignore[arg-type]


def read_by_its_ending(m: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.relu(x)
    return F.conv2d(hidden, m.weight, padding=1) + hidden  # type: ignore[arg-type]


def an_output(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(x)
    return F.conv2d(hidden, m.weight), hidden  # type: ignore[arg-type]


def read_through_a_view(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(x)
    return F.conv2d(hidden, m.weight), hidden.flatten(1)  # type: ignore[arg-type]


def costly(m: nn.Module, x: Tensor) -> Tensor:
    for _ in range(6):
        x = F.gelu(x)
    return F.conv2d(x, m.weight)  # type: ignore[arg-type]


def normalized(m: nn.Module, x: Tensor) -> Tensor:
    """One loop with its sum."""
    return F.conv2d(x / x.sum((2, 3), keepdim=True), m.weight)  # type: ignore[arg-type]


def many_inputs(m: nn.Module, x: Tensor) -> Tensor:
    parts = x.chunk(16, 1)
    return F.conv2d(sum(parts[1:], parts[0]), m.weight)  # type: ignore[arg-type]


def turned(m: nn.Module, x: Tensor) -> Tensor:
    """Neither channels nor columns lie side by side."""
    return F.conv2d(torch.relu(x.transpose(2, 3)), m.weight)  # type: ignore[arg-type]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "function",
    [
        read_twice,
        read_by_its_ending,
        an_output,
        read_through_a_view,
        costly,
        normalized,
        many_inputs,
        turned,
    ],
)
def test_what_stays_a_loop(function) -> None:  # type: ignore[no-untyped-def]
    channels = 1 if function is many_inputs else 16
    shape = (16, channels, 3, 3)
    windows, loops = steps_of(Lambda(function, **weights(shape, shape)), torch.randn(2, 16, 12, 10))
    assert loops and all(window.kernel.prologue is None for window in windows)


# What comes of it -------------------------------------------------------------------------------


class Dense(nn.Module):
    """Batch norms and ReLUs before convolutions, tensors that are joined, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(12), nn.BatchNorm2d(20)
        self.narrow = nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.wide = nn.Conv2d(20, 12, 1)
        for norm in (self.first, self.second):
            norm.running_mean.normal_()  # type: ignore[union-attr]
            norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        grown = torch.cat([x, self.narrow(torch.relu(self.first(x)))], 1)
        return torch.tanh(self.wide(torch.relu(self.second(grown))) + x)


class Squeezed(nn.Module):
    """A factor for each image and channel; strides, groups and what is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Linear(12, 12)
        self.convolve = nn.Conv2d(12, 8, 3, stride=2, padding=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sigmoid(self.factor(x.mean((2, 3))))
        return F.silu(self.convolve(x * factor[:, :, None, None]))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(12, 9, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolve(F.max_pool2d(x, 2)))


class Signals(nn.Module):
    """One axis with channels side by side, a transposed one, and a number that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.first = nn.Conv1d(12, 10, 5, padding=2)
        self.second = nn.ConvTranspose1d(10, 6, 4, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.gelu(x.view(x.shape[0], 80, 12).transpose(1, 2) * self.scale))
        return self.second(torch.sin(hidden.flip(0)))


class Joined(nn.Module):
    """Tensors that are joined for a convolution alone, and smallest of four."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(12, 6, 3), nn.Conv2d(24, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        small = self.first(-F.max_pool2d(-x, 2, 1, 1))
        near = x[:, :, 1:, 1:]
        return self.second(torch.cat([near[:, 4:], small, small.tanh()[:, :2], near[:, 2:10]], 1))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv3d(3, 5, (2, 3, 3), padding=1)

    def forward(self, x: Tensor) -> Tensor:
        volumes = x.unflatten(1, (3, 4))
        return self.convolve(torch.where(volumes > 0, volumes, 0.1 * volumes))


KINDS = (Dense, Squeezed, Pooled, Joined, Signals, Volumes)


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("always", "asked")
@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_as_exact_as_eager(  # type: ignore[no-untyped-def]
    kind: type[nn.Module], monkeypatch
) -> None:
    monkeypatch.setattr(rendering, "WINDOW_HEADER", str(STUB))
    monkeypatch.setattr(gradient, "HEADER", str(STUB))
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    torch.manual_seed(3)
    model, x = kind().eval(), torch.randn(3, 12, 10, 8)
    found = prepared(model, x)
    windows = [s.kernel for s in found.modes[0].inference.steps if isinstance(s, Window)]
    assert windows and all(each.prologue for each in windows)
    assert (kind is Signals) == any(lies_along(each.prologue, CHANNELS) for each in windows)
    fast = on_library(model, x, found, emulated(found.source), INFERRED)
    with torch.no_grad():
        for given in (x, torch.randn(5, 12, 10, 8)):
            ours, eager = fast(given), model(given)
            exact = copy.deepcopy(model).double()(given.double())
            allowed = max(1e-6, 2 * float((eager - exact).norm() / exact.norm()))
            assert float((ours - exact).norm() / exact.norm()) < allowed


@pytest.mark.sample(2)
@nvcc.needed
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("terms", [1, 3])
def test_a_source_of_them_alone_is_accepted(terms: int, tmp_path: Path) -> None:
    """With the headers that nothing but a prologue needs."""
    kernels: dict[str, WindowKernel] = {}
    for kind in (Joined, Signals) if terms == 1 else (Dense,):
        found = prepared(kind(), torch.randn(3, 12, 10, 8)).modes[0].inference
        kernels |= {s.kernel.name: s.kernel for s in found.steps if isinstance(s, Window)}
    chosen = [(each, choose_window(each, CUDA, {"s0": 3})) for each in kernels.values()]
    text = source_of(chosen, CUDA).text
    assert text.count("const auto source = fw::ComputedInput<custom") == len(kernels)
    nvcc.read(f"#define FW_CONVOLUTIONS {terms}\n{text}", tmp_path)
