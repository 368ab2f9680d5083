"""Channels-last copies for PyTorch's convolutions, beside our convolutions and reductions: a kernel
transposes tiles, and none moves single elements."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fusewright.codegen.convolution import convolution_forms
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ProgramPlans
from fusewright.ir.graph import ONE
from fusewright.ir.loop import Store
from fusewright.plan import rows
from fusewright.plan.steps import Call, Fused, Plan
from fusewright.rewrite import convolutions, layouts
from fusewright.rewrite.layouts import is_channels_last
from fusewright.schedule import tensor_core
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import as_exact_as_eager, on_library
from tests.support.plans import steps_of
from tests.support.stubs import stub_convolutions

HOPPER = Target.cuda()


def plans_of(*layers: nn.Module, size: int, channels: int = 64) -> ProgramPlans:
    x = torch.randn(16, channels, size, size)
    ready = prepare(nn.Sequential(*layers), (x,), modes=("train",), device=x.device, target=HOPPER)
    return ready.modes[0]


def convolution(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def backward_of(plans: ProgramPlans) -> Plan:
    assert plans.backward is not None
    called = [each for each in plans.backward.steps if isinstance(each, Call)]
    assert any("convolution_backward" in each.operators[0] for each in called), (
        "or nothing is transposed"
    )
    return plans.backward


def convolutions_of(plan: Plan) -> list[Fused]:
    found = [each for each in plan.steps if each.kind == "convolution"]
    assert found, "or nothing is shown"
    return found


def test_our_convolution_writes_row_major() -> None:
    """PyTorch needs its gradient and a factor of it in channels-last. Another kernel transposes
    both, although the convolution reads the one and writes the other."""
    layers = [layer for _ in range(3) for layer in (convolution(64), nn.ReLU())]
    backward = backward_of(plans_of(*layers, size=56))
    specs = dict(backward.specs)
    for step in convolutions_of(backward):
        assert [name for name in step.outputs if is_channels_last(specs[name])] == []
        assert convolution_forms(step.kernel)[0].schedule.lanes == 4
    turned = [
        each
        for each in steps_of(backward, "loop")
        if any(
            is_channels_last(specs[name]) and len(specs[name].shape) == 4 for name in each.outputs
        )
    ]
    large = [each for each in turned if each.bytes_moved > 1 << 20]
    assert len(large) == 6, "of each convolution its input and the gradient of its result"
    assert {choose(each.kernel, HOPPER, {"s0": 16}).kind for each in large} == {"transpose"}


def test_a_convolution_without_an_epilogue_writes_row_major() -> None:
    """For a PyTorch convolution, and as an output beside it."""
    model = Strided(bias=False)
    x = torch.randn(16, 64, 56, 56)
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=HOPPER)
    inference = found.modes[0].inference
    (step,) = convolutions_of(inference)
    (output,) = step.outputs
    assert not is_channels_last(dict(inference.specs)[output])
    assert convolution_forms(step.kernel)[0].schedule.lanes == 4


class Strided(nn.Module):
    """A convolution for our kernels, and one that is left to PyTorch."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 64, 3, padding=1, bias=bias)
        self.second = nn.Conv2d(64, 256, 8, stride=8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        return y, self.second(y)


@pytest.mark.sample(3)
@pytest.mark.parametrize("act", [nn.LeakyReLU(), nn.Hardtanh(), nn.PReLU()])
def test_values_saved_by_an_epilogue_are_row_major(act: nn.Module) -> None:
    """Backward would prefer its masks in channels-last. Both graphs agree on their layout."""
    layers = (nn.Conv2d(64, 64, 3, padding=1), act, nn.Conv2d(64, 256, 8, stride=8))
    plans = plans_of(*layers, size=56)
    assert plans.backward is not None and convolutions_of(plans.forward)
    program = plans.program
    assert program.backward is not None
    specs = program.forward.specs()
    first = sum(result.kind != "saved" for result in program.results)
    saved = [specs[name] for name in program.forward.outputs[first:] if isinstance(name, str)]
    given = [each.spec for each in program.backward.inputs[: len(saved)]]
    assert saved and [each and each.strides for each in saved] == [each.strides for each in given]


@pytest.mark.parametrize(("large", "apart"), [(rows.TRANSPOSED_BYTES, True), (1 << 40, False)])
def test_long_rows_are_not_written_with_a_stride(
    large: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a batch norm, which a PyTorch convolution reads in channels-last."""
    monkeypatch.setattr(rows, "TRANSPOSED_BYTES", large)
    layers = [
        layer for _ in range(2) for layer in (convolution(128), nn.BatchNorm2d(128), nn.ReLU())
    ]
    backward = backward_of(plans_of(*layers, size=28, channels=128))
    across = [
        each for each in steps_of(backward, "loop") if each.kernel.inner and writes_across(each)
    ]
    assert bool(across) == (not apart)


def writes_across(step: Fused) -> bool:
    kernel = step.kernel
    return any(
        item.access.strides[at] == ONE and kernel.axes[at].size != ONE
        for item in kernel.body
        if isinstance(item, Store) and all(stride.factor for stride in item.access.strides)
        for at in range(len(kernel.outer))
    )


# Our convolutions, PyTorch's, and what follows them ---------------------------------------------


class Mixed(nn.Module):
    """Residuals, norms, a pool and a transposed layer between convolutions of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = convolution(32), convolution(32)
        self.norm, self.strided = nn.BatchNorm2d(32), nn.Conv2d(32, 40, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(40, 32, 2, stride=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(self.first(x))
        z = torch.relu(self.norm(self.second(y)) + y)
        down = torch.nn.functional.silu(self.strided(z))
        pooled = torch.nn.functional.max_pool2d(z, 2)
        return torch.tanh(self.up(down)) * y, pooled, down.transpose(2, 3)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("asked", "operands_unrounded")
@pytest.mark.parametrize("seed", [1, 2])
def test_convolutions_of_either_kind_side_by_side(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of both kinds run in turn, and each finds in memory what the others left."""
    drawn = random.Random(seed)
    for each in ("is_worthwhile", "gradient_pays"):
        monkeypatch.setattr(convolutions, each, lambda *_: drawn.random() < 0.5)
    for module in (convolutions, tensor_core):
        monkeypatch.setattr(module, "prefers_direct", lambda *_: False)
    monkeypatch.setattr(layouts, "LEAST_BYTES", 1)
    monkeypatch.setattr(rows, "TRANSPOSED_BYTES", 1)
    stub_convolutions(monkeypatch)
    torch.manual_seed(seed)
    model, x = Mixed(), torch.randn(2, 32, 8, 12)
    prepared = prepare(model, (x,), modes=("train",), device=x.device, target=HOPPER)
    fast = on_library(model, x, prepared, emulated(prepared.source))
    as_exact_as_eager(fast, model, x, 2e-6)
