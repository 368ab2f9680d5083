"""Both gradients of a convolution from one staged input: which share it, and with what results."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.codegen import convolution as convolution_text
from fusewright.codegen import weight_gradient as gradient
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.cost.conv_staged import with_shared_staging
from fusewright.cost.convolution import prefers_shared
from fusewright.emit.steps import demands
from fusewright.ir.convolution import Geometry, by_eight
from fusewright.ir.graph import Dim
from fusewright.plan.steps import Step
from fusewright.rewrite import convolutions
from fusewright.runtime import tensor_cores
from fusewright.target.target import Target
from tests.support import nvcc
from tests.support.convolution_entry_on_host import axis_of
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import (
    as_exact_as_eager,
    gradients_alone,
    on_library,
    share_staged,
)
from tests.support.models import ParametricLambda
from tests.support.staging_models import STAGING_MODELS, Chain, ConvolutionAndLoop
from tests.support.stubs import CONVOLUTION_STUB

CUDA = Target.cuda()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    share_staged(monkeypatch)


def prepared(model: nn.Module, *inputs: Tensor, target: Target = CUDA) -> Prepared:
    given = tuple(each.requires_grad_() for each in inputs)
    return prepare(model, given, modes=("train",), device=torch.device("cpu"), target=target)


def backward(found: Prepared) -> tuple[Step, ...]:
    plan = found.modes[0].backward
    assert plan is not None
    return plan.steps


# Which gradients share --------------------------------------------------------------------------


def test_both_gradients_read_one_staged_input() -> None:
    """At a usual size, by the cost model. The loop that sums the bias gradient writes nothing else:
    both kernels compute the rest while they load."""
    steps = backward(prepared(ConvolutionAndLoop(64, 128), torch.randn(64, 64, 56, 56)))
    (loop,) = (step for step in steps if step.kind == "loop" and step.kernel.inner)
    (convolution,) = (step for step in steps if step.kind == "convolution")
    (weights,) = (step for step in steps if step.kind == "weight_gradient")
    assert convolution.kernel.prologue is not None
    assert weights.kernel.prologue == convolution.kernel.prologue
    assert (
        weights.kernel.back is not None and weights.kernel.back.staged == convolution.kernel.staged
    )
    assert (
        convolution.outputs[-1] == convolution.kernel.staged
        and convolution.kernel.staged in weights.inputs
    )
    gradients = [each for each in loop.outputs if each in (*convolution.inputs, *weights.inputs)]
    assert not gradients


def test_small_images_are_ours_only_beside_the_input_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, PyTorch's weight gradient of many channels and few positions is faster."""
    weight, x = torch.randn(512, 512, 3, 3), torch.randn(64, 512, 7, 7)
    beside = ParametricLambda(lambda m, x: F.conv2d(x, m.weight, padding=1), weight=weight)
    alone = ParametricLambda(lambda m, x: F.conv2d(x.detach(), m.weight, padding=1), weight=weight)
    (found,) = (s for s in backward(prepared(beside, x)) if s.kind == "weight_gradient")
    assert found.kernel.back is not None
    assert not any(step.kind == "weight_gradient" for step in backward(prepared(alone, x)))
    monkeypatch.setattr(
        convolutions, "is_worthwhile", lambda *_: False
    )  # PyTorch computes the input gradient
    assert not any(step.kind == "weight_gradient" for step in backward(prepared(beside, x)))


def test_gradients_are_computed_layer_by_layer() -> None:
    """Not all staging first: the staged input of a whole network would be in memory at once."""
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.SiLU()) for _ in "123"]
    steps = backward(prepared(nn.Sequential(*layers), torch.randn(64, 64, 56, 56)))
    kinds = [step.kind for step in steps if step.kind in ("convolution", "weight_gradient")]
    assert kinds == ["convolution", "weight_gradient"] * 3


def twice(m: nn.Module, x: Tensor) -> Tensor:
    left, right = torch.relu(x), torch.sigmoid(x)
    weight, second = m.weight, m.second
    return F.conv2d(left, weight, padding=1) * F.conv2d(right, second, padding=1)  # type: ignore[arg-type]


def test_a_loop_is_dropped_if_both_its_readers_compute_it() -> None:
    model = ParametricLambda(
        twice, weight=torch.randn(128, 64, 3, 3), second=torch.randn(128, 64, 3, 3)
    )
    plan = prepared(model, torch.randn(32, 64, 56, 56)).modes[0].inference
    assert not any(step.kind == "loop" and not step.outputs for step in plan.steps)
    assert sum(
        step.kind == "convolution" and step.kernel.prologue is not None for step in plan.steps
    )


def test_nothing_is_shared_without_tf32() -> None:
    target = Target.cuda(conv_tf32=False)
    steps = backward(
        prepared(ConvolutionAndLoop(64, 128), torch.randn(64, 64, 56, 56), target=target)
    )
    assert not any(step.kernel.staged for step in steps if step.kind == "convolution")
    assert not any(step.kernel.back for step in steps if step.kind == "weight_gradient")


def sizes(ins: int, outs: int, size: int, taps: int = 3, images: int = 32) -> Geometry:
    axis = axis_of(size, taps, 1, 1, taps // 2)
    return Geometry(Dim(images), 1, ins, outs, axis, axis)


def test_few_channels_do_not_share() -> None:
    """cuDNN rounds nothing there."""
    for ins, outs in ((16, 64), (64, 16)):
        of = sizes(ins, outs, 56)
        assert not prefers_shared(of, of.input_gradient, {}, CUDA)
    of = sizes(64, 64, 112)
    assert prefers_shared(of, of.input_gradient, {}, CUDA)


def test_staged_rows_have_one_stride() -> None:
    of = sizes(64, 64, 30, 5)
    ours, theirs = with_shared_staging(of, of.input_gradient)
    assert ours.x.extent == theirs.x.extent == by_eight(theirs).x.extent == 32
    assert ours.y.extent == theirs.y.extent == 32


# Results ----------------------------------------------------------------------------------------


def on_host(monkeypatch: pytest.MonkeyPatch, terms: int = 1) -> None:
    for module, name in (
        (convolution_text, "HEADER"),
        (gradient, "HEADER"),
        (gradient, "STAGED_HEADER"),
    ):
        monkeypatch.setattr(module, name, str(CONVOLUTION_STUB))
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", terms == 1)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("always", "asked")
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("kind", STAGING_MODELS)
def test_modules_are_as_exact_as_eager(
    kind: type[nn.Module], terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(monkeypatch, terms)
    torch.manual_seed(3)
    model, x = kind(), torch.randn(3, 6, 10, 8)
    found = prepared(model, x)
    gradients = [s.kernel for s in backward(found) if s.kind == "weight_gradient"]
    assert gradients and all(each.back for each in gradients)
    fast = on_library(model, x, found, emulated(found.source))
    for given in (x, torch.randn(5, 6, 10, 8)):
        as_exact_as_eager(fast, copy.deepcopy(model), given.detach(), 2e-6)


@pytest.mark.usefixtures("always", "asked")
@pytest.mark.parametrize("wanted", ["input", "weights"])
def test_one_gradient_alone(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staged input is there for whichever gradient is wanted."""
    on_host(monkeypatch)
    torch.manual_seed(3)
    model, x = ConvolutionAndLoop(6, 8), torch.randn(3, 6, 9, 8)
    found = prepared(model, x)
    fast = on_library(model, x, found, emulated(found.source))
    for ours, eager in gradients_alone(fast, model, x, wanted):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("always")
def test_what_is_staged_is_wanted_wherever_its_kernel_runs() -> None:
    """Layers share kernels, in which the staged input has the name that one of them gave it."""
    model = nn.Sequential(*(ConvolutionAndLoop(6, 6) for _ in range(4)))
    plan = prepared(model, torch.randn(3, 6, 9, 8)).modes[0].backward
    assert plan is not None
    found = demands(plan, one_by_one=True)
    staged = [(step, name) for step in plan.kernels for name, _ in step.staged]
    assert len(staged) == 4 > len({step.kernel.name for step, _ in staged})
    assert all(found.of[name] == found.step(step) for step, name in staged)


@pytest.mark.sample(2)
@nvcc.needed
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("terms", [1, 3])
def test_nvcc_accepts_the_source(terms: int, tmp_path: Path) -> None:
    found = prepared(Chain(), torch.randn(3, 6, 10, 8))
    nvcc.read(f"#define FW_CONVOLUTIONS {terms}\n{found.source.text}", tmp_path)
