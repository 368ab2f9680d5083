"""Convolutions in channels-last on CUDA targets: what is planned, and that results do not change.

Planning needs no GPU. The programs run by emulation, with PyTorch's own convolutions on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusewright.capture import capture
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.loading import kernels_of, load
from fusewright.compile.module import optimized
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.ir.graph import ONE, Graph, Program
from fusewright.ir.interpret import interpret
from fusewright.plan.show import show
from fusewright.plan.steps import Call, Plan
from fusewright.rewrite import layouts, rewrite
from fusewright.rewrite.layouts import is_channels_last, with_channels_last
from fusewright.rewrite.tf32_operands import ALLOWED
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support import nvcc
from tests.support.cuda_on_host import emulated
from tests.support.loop_runs import EMULATED, compile_source
from tests.support.plans import steps_of

CUDA = Target.cuda(tensor_cores=False)


class Epilogue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 48, 3)
        self.bias = nn.Parameter(torch.randn(48, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.clamp(self.conv(x), max=0.5) + self.bias) * 2


class Chain(nn.Module):
    """Three convolutions with loops and a residual between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.third = nn.Conv2d(64, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return nn.functional.gelu(self.third(torch.relu(self.second(y) + y)))


class Masked(nn.Module):
    """A clamped value between two convolutions: its mask is saved, in a layout of our choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.clamp(self.first(x), max=0.5) * 2)


class Elsewhere(nn.Module):
    """Results that calls, views and the caller read too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.conv(x * 2)
        pooled = nn.functional.max_pool2d(torch.relu(y), 2)
        return y, pooled, y.transpose(1, 2), self.conv(pooled).flatten(1).exp()


class Pooled(nn.Module):
    """A value that a convolution and another call save: backward reads it in both layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        pooled = nn.functional.max_pool2d(y, 3, stride=2)
        return self.second(y).mean((2, 3)) * pooled.mean((2, 3))


class Separable(nn.Module):
    """A depthwise convolution and a 1×1 convolution, as they follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.all, self.up = nn.Conv2d(32, 48, 1), nn.ConvTranspose2d(48, 32, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(torch.relu(self.all(torch.tanh(self.each(x))))))


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(32, 33, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(32, 64, 3), nn.LayerNorm((64, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


MODELS = {
    "epilogue": (Epilogue, (2, 32, 18, 22)),
    "chain": (Chain, (2, 32, 16, 20)),
    "masked": (Masked, (2, 32, 17, 15)),
    "elsewhere": (Elsewhere, (2, 32, 16, 16)),
    "separable": (Separable, (2, 32, 8, 12)),
    "pooled": (Pooled, (2, 32, 15, 17)),
    "volume": (Volume, (2, 32, 7, 9, 8)),
    "normed": (Normed, (2, 32, 18, 18)),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small sizes, which can be emulated, count as large."""
    monkeypatch.setattr(layouts, "LEAST_BYTES", 1)
    yield


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind(), torch.randn(shape, requires_grad=True)


def programs(model: nn.Module, x: torch.Tensor) -> tuple[Program, Program]:
    before = rewrite(capture(model, (x,), None, mode="train"))
    return before, with_channels_last(before)


@functools.cache
def programs_of(name: str) -> tuple[Program, Program]:
    """For tests with the fixture `small`."""
    return programs(*made(name))


def prepared(model: nn.Module, x: torch.Tensor, target: Target = CUDA) -> Prepared:
    return prepare(model, (x,), modes=("train",), device=torch.device("cpu"), target=target)


@functools.cache
def prepared_of(name: str) -> Prepared:
    """For tests with the fixture `small`."""
    return prepared(*made(name))


def convolutions(plan: Plan) -> list[Call]:
    return [s for s in plan.steps if isinstance(s, Call) and "convolution" in s.node.op]


ROUNDED = ("round_tf32", "where")


def copies(plan: Plan) -> list[str]:
    """Copies that only change the layout, or round what a weight gradient reads, too."""
    loops = [step for step in steps_of(plan, "loop") if step.operators in ((), ROUNDED)]
    return [next(name for name in step.inputs if name != ALLOWED) for step in loops]


def test_the_plan_of_an_epilogue(small: None) -> None:
    plans = prepared_of("epilogue").modes[0]
    assert copies(plans.forward) == copies(plans.inference) == ["x", "conv_weight"]
    assert plans.backward is not None
    # The loop that computes the gradient writes it in channels-last; forward saved x so.
    assert copies(plans.backward) == ["conv_weight", "getitem_1", "getitem"]
    specs = dict(plans.backward.specs)
    assert is_channels_last(specs["where_tf32"]) and is_channels_last(specs["x"])
    assert not is_channels_last(specs["le"]), "the mask has the layout of the gradient it meets"
    (call,) = convolutions(plans.backward)
    assert "it reads and writes channels-last, so it transposes nothing" in call.reason
    assert "copy to another layout" in show(plans) and call.reason in show(plans)


def test_a_chain_stays_in_channels_last(small: None) -> None:
    plans = prepared_of("chain").modes[0]
    assert copies(plans.forward) == ["x", "first_weight", "second_weight"]
    specs = dict(plans.forward.specs)
    images = {n: s for n, s in specs.items() if len(s.shape) == 4 and s.shape[2].factor > 3}
    plain = {name for name, spec in images.items() if not is_channels_last(spec)}
    wanted = {"x", "mul_14", "convolution_2"}
    assert plain == wanted, "only the argument, the output and what is saved with it"
    assert plans.backward is not None
    weights = {"first_weight", "second_weight"}
    assert len(set(copies(plans.backward)) - weights) == 4, "gradients that are given out"


def test_a_mask_between_convolutions_is_channels_last(small: None) -> None:
    _, after = programs_of("masked")
    assert after.backward is not None
    saved = [i.spec for i in after.backward.inputs if i.spec.shape[0].symbols]
    *held, tangent = saved
    assert "bool" in {spec.dtype for spec in held} and all(map(is_channels_last, held))
    assert not is_channels_last(tangent)


@pytest.mark.parametrize("name", MODELS)
def test_saved_values_have_the_layout_that_backward_expects(small: None, name: str) -> None:
    before, after = programs_of(name)
    assert after != before and after.backward is not None
    n_given = sum(result.kind != "saved" for result in after.results)
    specs = after.forward.specs()
    saved = after.forward.outputs[n_given:]
    for output, held in zip(saved, after.backward.inputs, strict=False):
        assert isinstance(output, str) and specs[output] == held.spec
    old, new = before.forward.specs(), after.forward.specs()
    for position in range(n_given):
        one, other = before.forward.outputs[position], after.forward.outputs[position]
        assert old[str(one)] == new[str(other)], "an output's layout"
    assert before.backward is not None
    old, new = before.backward.specs(), after.backward.specs()
    for one, other in zip(before.backward.outputs, after.backward.outputs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or old[str(one)] == new[str(other)], "a gradient's layout"


@pytest.mark.parametrize("name", MODELS)
def test_the_interpreter_sees_no_difference(small: None, name: str) -> None:
    before, after = programs_of(name)
    sizes = before.example_sizes
    graphs: list[tuple[Graph | None, Graph | None]] = [
        (before.forward, after.forward),
        (before.inference, after.inference),
        (before.backward, after.backward),
    ]
    for old, new in graphs:
        assert old is not None and new is not None
        inputs = [_random(each.spec, sizes) for each in old.inputs]
        for one, other in zip(
            interpret(old, inputs, sizes), interpret(new, inputs, sizes), strict=True
        ):
            assert (one is None and other is None) or torch.equal(one, other)


def _random(spec: Any, sizes: dict[str, int]) -> torch.Tensor:
    shape = [size.at(sizes) for size in spec.shape]
    if spec.dtype == "bool":
        return torch.rand(shape) < 0.5
    return torch.rand(shape).to(getattr(torch, spec.dtype))


def emulated_module(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The module as a GPU would run it, its kernels emulated; the model and an input."""
    model, x = made(name)
    ready = prepared_of(name)
    source = emulated(ready.source)
    modes = tuple(replace(m, owners=owners_of(model, m.program.mode)) for m in ready.modes)
    bundle = ModuleBundle("emulated", "host", source, arguments_of(model, (x,)), modes)
    kernels = kernels_of(source, lambda _: compile_source(source, EMULATED))
    return optimized(model, load(bundle, kernels)), model, x


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_outputs_and_gradients_as_eager_gives_them(
    small: None, operands_unrounded: None, name: str
) -> None:
    ours, model, x = emulated_module(name)
    found, wanted = _run(ours, x), _run(model, x)
    for one, other in zip(found, wanted, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for one, other in zip(_results(ours, x), _results(model, x), strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _results(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = model(x)
    return result if isinstance(result, tuple) else (result,)


def _run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    outputs = _results(model, x)
    torch.manual_seed(1)
    loss = sum((out * torch.randn(out.shape)).sum() for out in outputs)
    assert isinstance(loss, torch.Tensor)
    gradients = torch.autograd.grad(loss, [x, *model.parameters()])
    return [*outputs, *gradients]


def test_a_batch_of_another_size(small: None, operands_unrounded: None) -> None:
    ours, model, x = emulated_module("epilogue")
    for n in (3, 5):
        y = torch.randn(n, *x.shape[1:], requires_grad=True)
        for one, other in zip(_run(ours, y), _run(model, y), strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_row_kernel_of_two_layouts_is_split(small: None) -> None:
    plans = prepared_of("normed").modes[0]
    kinds = [choose(x.kernel, CUDA, {"s0": 2}).kind for x in steps_of(plans.inference, "loop")]
    assert kinds.count("transpose") >= 2, "the input's copy and the normalised result"
    host = prepared(*made("normed"), target=Target.host()).modes[0]
    assert len(steps_of(host.inference, "loop")) == 1, "one row kernel where there is one layout"


def test_cudnns_precision_is_queried_for_eagers_layout(small: None) -> None:
    """An input is channels-last because of another convolution, and is not in eager mode."""
    up, last = nn.ConvTranspose2d(64, 64, 5, stride=5), nn.Conv2d(64, 96, 3, padding=1)
    model = nn.Sequential(up, nn.ReLU(), last, nn.Tanh())
    ready = prepare(
        model,
        (torch.randn(32, 64, 16, 16),),
        device=torch.device("cpu"),
        target=Target.cuda(),
        modes=("eval",),
    )
    (step,) = steps_of(ready.modes[0].inference, "convolution")
    assert step.kind == "convolution" and step.kernel.source.strides[1] == ONE, (
        "read without a copy"
    )
    assert step.kernel.instead.source.strides[-1] == ONE
    assert any("channels-last" in call.reason for call in convolutions(ready.modes[0].inference))


def kinds_of(model: nn.Module, x: torch.Tensor, target: Target = CUDA) -> set[bool]:
    """Whether the convolutions of the plan are in channels-last."""
    plan = prepared(model, x, target).modes[0].inference
    return {"channels-last" in call.reason for call in convolutions(plan)}


def test_which_convolutions_gain_by_channels_last(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 32, 12, 12)
    good = nn.Conv2d(32, 32, 3)
    assert kinds_of(good, x) == {True}
    assert kinds_of(good, x, Target.host()) == {False}
    assert kinds_of(nn.Conv2d(32, 32, 3, groups=2), x) == {False}
    assert kinds_of(nn.Conv2d(32, 32, 3, groups=32), x) == {True}, "each channel has its weights"
    assert kinds_of(nn.Conv2d(32, 64, 3, groups=32), x) == {False}
    transposed = nn.ConvTranspose2d(32, 32, 3)
    assert kinds_of(nn.Sequential(transposed, nn.SiLU()), x) == {True}
    assert kinds_of(transposed, x) == {False}, "cuDNN's own copies are as fast"
    assert kinds_of(nn.ConvTranspose2d(32, 32, 3, groups=32), x) == {False}
    assert kinds_of(nn.Conv2d(32, 48, 1), x) == {False}, "a matmul, without any transpose"
    assert kinds_of(nn.Conv2d(32, 48, 1), x[..., :11, :11]) == {True}, "rows of odd length"
    assert kinds_of(nn.Conv2d(32, 48, 1, stride=2), x) == {True}
    assert kinds_of(nn.Conv2d(32, 31, 3), x) == {False}
    assert kinds_of(nn.Conv2d(16, 64, 3), x[:, :16]) == {False}
    assert kinds_of(nn.Conv2d(32, 32, 12), x) == {False}, "one pixel has no layout"
    assert kinds_of(nn.Conv1d(32, 32, 3), x[:, :, 0]) == {False}
    assert kinds_of(good.double(), x.double()) == {False}
    assert kinds_of(nn.Conv2d(8, 8, 3).half(), x[:, :8].half()) == {True}
    monkeypatch.undo()
    assert kinds_of(nn.Conv2d(32, 32, 3), x) == {False}, "too small to pay for a copy"


@pytest.mark.parametrize(
    ("after", "last"), [(nn.Identity(), False), (nn.SiLU(), True), (nn.Conv2d(48, 40, 3), True)]
)
def test_a_transposed_convolution_alone_is_left_as_it_is(
    small: None, after: nn.Module, last: bool
) -> None:
    """Our copies would only replace cuDNN's, where no loop takes them over."""
    model = nn.Sequential(nn.ConvTranspose2d(32, 48, 3, stride=2, bias=False), after).eval()
    x = torch.randn(2, 32, 9, 12)
    program = rewrite(capture(model, (x,), mode="eval"))
    changed = with_channels_last(program)
    first = next(n for n in changed.inference.nodes if n.op == layouts.FORWARD)
    assert first.spec is not None and is_channels_last(first.spec) is last
    (made,) = interpret(changed.inference, [*model.parameters(), x], changed.example_sizes)
    torch.testing.assert_close(made.float(), model(x))


def test_a_model_in_channels_last_is_left_as_it_is(small: None) -> None:
    model, x = made("epilogue")
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.detach().to(memory_format=torch.channels_last)
    before, after = programs(model, x)
    assert after.forward == before.forward and after.inference == before.inference


@pytest.mark.sample(0)
@nvcc.needed
def test_the_kernels_of_a_chain_compile(small: None, tmp_path: Path) -> None:
    nvcc.no_spills(prepared_of("chain").source.text, tmp_path)


def test_no_kernel_moves_elements_one_by_one(small: None) -> None:
    plans = prepared_of("epilogue").modes[0]
    assert plans.backward is not None
    loops = [*steps_of(plans.forward, "loop"), *steps_of(plans.backward, "loop")]
    picked = {step.inputs[0]: choose(step.kernel, CUDA, {"s0": 128}) for step in loops}
    assert {name: (each.kind, each.lanes) for name, each in picked.items()} == {
        "x": ("transpose", 4),
        "conv_weight": ("transpose", 1),
        "convolution_bare": ("transpose", 4),
        "grad_output": ("transpose_row", 4),
        "getitem_1": ("transpose", 1),
        "getitem": ("transpose", 4),
    }
    assert all(step.kind == "loop" for step in loops)
