"""Loops before a convolution that become its prologue: which do, and with what results."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.compile.pipeline import Prepared, prepare
from fusewright.ir.convolution import CHANNELS, ConvolutionKernel, is_contiguous_along
from fusewright.kinds.registry import render
from fusewright.plan import prologues
from fusewright.plan.steps import Fused
from fusewright.schedule.tensor_core import ConvolutionSchedule, choose_convolution
from fusewright.target.target import Target
from tests.support import nvcc
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import INFERRED, on_library, use_tensor_cores
from tests.support.models import ParametricLambda
from tests.support.prologue_models import (
    PROLOGUE_MODELS,
    Dense,
    Joined,
    Signals,
)
from tests.support.stubs import stub_convolutions

CUDA = Target.cuda()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tensor_cores(monkeypatch)
    monkeypatch.setattr(prologues, "prefers_computed", lambda *_: True)


def prepared(model: nn.Module, *inputs: Tensor) -> Prepared:
    device = torch.device("cpu")
    return prepare(model.eval(), inputs, modes=("eval",), device=device, target=CUDA)


def steps_of(model: nn.Module, *inputs: Tensor) -> tuple[list[Fused], list[Fused]]:
    """Convolutions and loops of inference."""
    steps = prepared(model, *inputs).modes[0].inference.steps
    convolutions = [step for step in steps if step.kind == "convolution"]
    return convolutions, [step for step in steps if step.kind == "loop"]


def weights(*shapes: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    names = ("weight", "second", "third")
    return {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=False)}


# Which become prologues -------------------------------------------------------------------------


def relu_first(m: nn.Module, x: Tensor) -> Tensor:
    return F.conv2d(torch.relu(x), m.weight, padding=1)  # type: ignore[arg-type]


def test_a_loop_before_a_convolution_becomes_its_prologue() -> None:
    """At a usual size, by the cost model; staging computes it."""
    x = torch.randn(64, 128, 28, 28)
    (convolution,), loops = steps_of(ParametricLambda(relu_first, **weights((128, 128, 3, 3))), x)
    assert not loops and convolution.inputs == ("input_0", "weight")
    assert convolution.operators == ("relu", "convolution")
    schedule = choose_convolution(convolution.kernel, CUDA, {"s0": 64})
    assert isinstance(schedule, ConvolutionSchedule) and schedule.staged_positions


def test_without_tf32_it_stays_a_loop() -> None:
    """Without TF32 nothing is staged, and every tile would compute the loop again."""
    model, x = (
        ParametricLambda(relu_first, **weights((128, 128, 3, 3))),
        torch.randn(64, 128, 28, 28),
    )
    target = Target.cuda(conv_tf32=False)
    found = prepare(model, (x,), modes=("train",), device=x.device, target=target).modes[0]
    assert [step.kind for step in found.inference.steps] == ["loop", "convolution"]


def test_values_that_backward_reads_are_written() -> None:
    model = ParametricLambda(relu_first, **weights((128, 128, 3, 3)))
    x, device = torch.randn(64, 128, 28, 28), torch.device("cpu")
    found = prepare(model, (x,), modes=("train",), device=device, target=CUDA).modes[0]
    kernels = [step.kernel for step in found.forward.steps if step.kind == "convolution"]
    assert [kernel.prologue for kernel in kernels] == [None]


def read_twice(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(x)
    return F.conv2d(hidden, m.weight), F.conv2d(hidden, m.second)  # type: ignore[arg-type]


def read_by_its_epilogue(m: nn.Module, x: Tensor) -> Tensor:
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


def transposed(m: nn.Module, x: Tensor) -> Tensor:
    """Neither channels nor columns are contiguous."""
    return F.conv2d(torch.relu(x.transpose(2, 3)), m.weight)  # type: ignore[arg-type]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "function",
    [
        read_twice,
        read_by_its_epilogue,
        an_output,
        read_through_a_view,
        costly,
        normalized,
        many_inputs,
        transposed,
    ],
)
def test_which_loops_stay_loops(function) -> None:  # type: ignore[no-untyped-def]
    channels = 1 if function is many_inputs else 16
    shape = (16, channels, 3, 3)
    convolutions, loops = steps_of(
        ParametricLambda(function, **weights(shape, shape)), torch.randn(2, 16, 12, 10)
    )
    assert loops and all(convolution.kernel.prologue is None for convolution in convolutions)


# Results ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("always", "asked")
@pytest.mark.parametrize("kind", PROLOGUE_MODELS)
def test_modules_are_as_exact_as_eager(  # type: ignore[no-untyped-def]
    kind: type[nn.Module], monkeypatch
) -> None:
    stub_convolutions(monkeypatch)
    torch.manual_seed(3)
    model, x = kind().eval(), torch.randn(3, 12, 10, 8)
    found = prepared(model, x)
    kernels = [s.kernel for s in found.modes[0].inference.steps if s.kind == "convolution"]
    assert kernels and all(each.prologue for each in kernels)
    by_channels = any(is_contiguous_along(each.prologue, CHANNELS) for each in kernels)
    assert (kind is Signals) == by_channels
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
def test_nvcc_accepts_a_source_of_prologues_alone(terms: int, tmp_path: Path) -> None:
    """Its headers are those that only a prologue needs."""
    kernels: dict[str, ConvolutionKernel] = {}
    for kind in (Joined, Signals) if terms == 1 else (Dense,):
        found = prepared(kind(), torch.randn(3, 12, 10, 8)).modes[0].inference
        kernels |= {s.kernel.name: s.kernel for s in found.steps if s.kind == "convolution"}
    chosen = [(each, choose_convolution(each, CUDA, {"s0": 3})) for each in kernels.values()]
    text = render(chosen, CUDA).text
    assert text.count("const fw::ComputedInput<") == len(kernels)
    nvcc.read(f"#define FW_CONVOLUTIONS {terms}\n{text}", tmp_path)
