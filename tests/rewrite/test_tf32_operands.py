"""Operands of PyTorch's weight gradients in channels-last are rounded to TF32: which ones, and what
that does to the error of a kernel that cuts instead, as cuDNN's does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.compile.pipeline import Prepared, prepare
from fusewright.ir.graph import ONE, contiguous_strides
from fusewright.ir.interpret import round_tf32
from fusewright.plan.steps import Call, Plan, inputs_of
from fusewright.rewrite import layouts
from fusewright.rewrite.tf32_operands import ALLOWED
from fusewright.target.target import Target
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import on_library, trained
from tests.support.plans import steps_of

CUDA = Target.cuda(tensor_cores=False)


class Chain(nn.Module):
    """A saved value that a mask reads, too, one that other loops read, and a transposed
    convolution."""

    def __init__(self, channels: int = 32, middle: int = 40) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, middle, 3, padding=1)
        self.second = nn.Conv2d(middle, 32, 3, bias=False)
        self.up = nn.ConvTranspose2d(32, 48, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.second(torch.relu(self.first(x))))
        return torch.tanh(self.up(y) + y.mean())


_BACKWARD = torch.ops.aten.convolution_backward.default


class Gradients(TorchDispatchMode):
    """PyTorch's gradients, by the weights of operands that `changed` is applied to."""

    def __init__(self, changed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.changed = changed
        self.operands: list[Tensor] = []

    def __call__(self, dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        self.operands += [dy, x]
        by_input = _BACKWARD(dy, x, *rest)[0]
        return (by_input, *_BACKWARD(self.changed(dy), self.changed(x), *rest)[1:])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self(*args) if func is _BACKWARD else func(*args, **(kwargs or {}))


def cut(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32).view_as(x)


def rounded(x: Tensor) -> Tensor:
    return round_tf32(x.contiguous())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes, which can be emulated, count as large."""
    monkeypatch.setattr(layouts, "LEAST_BYTES", 1)


def prepared(model: nn.Module, x: Tensor, target: Target = CUDA) -> Prepared:
    return prepare(model, (x,), modes=("train",), device=x.device, target=target)


def operands_of(plan: Plan | None) -> list[tuple[str, ...]]:
    """What PyTorch's gradients read: the result's gradient and the input."""
    assert plan is not None
    calls = [each for each in plan.steps if isinstance(each, Call)]
    return [inputs_of(each)[:2] for each in calls if each.node.op == layouts.BACKWARD]


def test_what_is_rounded(small: None) -> None:
    plans = prepared(Chain(), torch.randn(2, 32, 12, 12)).modes[0]
    assert all(name.endswith("_tf32") for pair in operands_of(plans.backward) for name in pair[:1])
    given = {each.name for each in plans.program.backward.inputs} if plans.program.backward else ()
    inputs = {pair[1] for pair in operands_of(plans.backward)}
    assert inputs - set(given), "what other loops of backward read is rounded there"
    stored = {name for step in steps_of(plans.forward, "loop") for name in step.outputs}
    assert {"x_last_tf32", "relu_tf32"} <= stored, "forward saves rounded values"
    assert {"relu", "x_last"}.isdisjoint(stored), "and nothing else instead of them"
    found = [each for each in plans.forward.steps if each.outputs == (ALLOWED,)]
    assert [each.reason for each in found if isinstance(each, Call)] == [
        "whether PyTorch's flags allow TF32 for convolutions"
    ]


def test_our_convolutions_read_what_was_rounded() -> None:
    """So that only a sum reads the exact gradient, in eager mode's layout; or nothing does."""

    def outputs(*after: nn.Module) -> tuple[tuple[str, ...], Plan]:
        model = nn.Sequential(nn.ConvTranspose2d(64, 64, 3, stride=2), *after)
        plan = prepared(model, torch.empty(8, 64, 96, 96), Target.cuda()).modes[0].backward
        assert plan is not None
        (gradient, _), *_ = operands_of(plan)
        (ours,) = steps_of(plan, "convolution")
        assert inputs_of(ours)[0] == gradient and gradient.endswith("_tf32")
        (loop,) = [step for step in steps_of(plan, "loop") if gradient in step.outputs]
        return loop.outputs, plan

    together, _ = outputs(nn.Tanh())
    assert len(together) == 2, "the gradient and its sums"
    apart, plan = outputs(nn.Softmax(1))
    exact = next(name for name in apart if not name.endswith("_tf32"))
    specs = dict(plan.specs)
    assert specs[exact].strides == contiguous_strides(specs[exact].shape)
    assert specs[f"{exact}_tf32"].strides[1] == ONE


@pytest.mark.parametrize("case", ["channels", "results", "last", "double", "host"])
def test_what_is_not_rounded(small: None, case: str) -> None:
    """Kernels for other channels do not round in either layout; nor is a layout of the user's
    less exact than in eager mode."""
    channels, middle = (36 if case == "channels" else 32), (44 if case == "results" else 40)
    model: nn.Module = nn.Conv2d(channels, middle, 3)
    x = torch.randn(2, channels, 12, 12, requires_grad=True)
    if case == "last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.detach().to(memory_format=torch.channels_last)
    if case == "double":
        model, x = model.double(), x.detach().double()
    target = Target.host() if case == "host" else CUDA
    plans = prepared(nn.Sequential(model, nn.Tanh()), x, target).modes[0]
    for plan in (plans.forward, plans.inference, plans.backward):
        assert plan is not None
        assert not [each for each in plan.steps if ALLOWED in each.outputs]
    model = nn.Sequential(nn.Conv2d(32, 40, 3), nn.Tanh())
    plan = prepared(model, torch.randn(2, 32, 12, 12)).modes[0].backward
    assert plan and [each for each in plan.steps if ALLOWED in each.outputs], "else all pass"


def fast(model: nn.Module, x: Tensor) -> nn.Module:
    ready = prepared(model, x)
    return on_library(model, x, ready, emulated(ready.source))


def errors(found: list[Tensor], model: nn.Module, x: Tensor) -> list[float]:
    """Of the weights' gradients, relative to float64."""
    truth = trained(copy.deepcopy(model).double(), x.double())
    at = [2 + at for at, each in enumerate(model.parameters()) if each.dim() == 4]
    pairs = [(found[each].double(), truth[each]) for each in at]
    return [float((one - exact).norm() / exact.norm()) for one, exact in pairs]


def of_eager(model: nn.Module, x: Tensor, changed: Callable[[Tensor], Tensor]) -> list[float]:
    with Gradients(changed):
        found = trained(model, x)
    return errors(found, model, x)


def test_a_kernel_that_cuts_is_as_exact_as_one_that_rounds(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Chain(), torch.rand(2, 32, 12, 12)
    module = fast(model, x)
    monkeypatch.setattr(torch.ops.aten.convolution_backward, "default", Gradients(cut))
    ours = errors(trained(module, x), model, x)
    monkeypatch.undo()
    rounding, cutting = of_eager(model, x, rounded), of_eager(model, x, cut)
    for mine, one, other in zip(ours, rounding, cutting, strict=True):
        assert mine <= 1.5 * one < 0.2 * other, "forward's rounding is in it, too"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_nothing_is_rounded_where_tf32_is_not_allowed(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag counts at the time of the call: one module serves both."""
    model, x = Chain(), torch.rand(2, 32, 12, 12)
    module, before = fast(model, x), torch.backends.cudnn.allow_tf32
    try:
        for allowed in (True, False, True):
            torch.backends.cudnn.allow_tf32 = allowed
            seen = Gradients(lambda each: each)
            monkeypatch.setattr(torch.ops.aten.convolution_backward, "default", seen)
            found = trained(module, x)
            assert [torch.equal(cut(each), each) for each in seen.operands] == [allowed] * 6
            wanted, close = trained(model, x), 2e-3 if allowed else 1e-5
            for one, other in zip(found, wanted, strict=True):
                assert float((one - other).norm()) <= close * float(other.norm())
    finally:
        torch.backends.cudnn.allow_tf32 = before
