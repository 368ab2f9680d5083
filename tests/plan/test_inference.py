"""Inference runs forward's kernels, without the outputs that only backward reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import fusewright
from fusewright.compile import planning
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.emit.text import module_text
from fusewright.ir.loop import LoopKernel, Store
from fusewright.plan import inference
from fusewright.plan.inference import with_kernels_of
from fusewright.plan.steps import Fused
from fusewright.target.target import Target
from tests.support.tensors import close

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (nn.ReLU, (64, 96)),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(96), nn.ReLU()), (64, 96)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(96), nn.ReLU()), (256, 96)),
    "norm alone": (lambda: nn.LayerNorm(96), (64, 96)),
    "rows": (lambda: nn.LayerNorm((8, 96)), (32, 8, 96)),
    "layers": (lambda: nn.Sequential(nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 8)), (64, 96)),
    "pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), (4, 3, 16, 16)),
}


def plans_of(name: str, target: Target) -> tuple[ProgramPlans, ...]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return prepare(make(), (torch.randn(shape),), device=torch.device("cpu"), target=target).modes


@pytest.mark.parametrize("name", ["norm alone", "rows"])
def test_kernels_of_forward_do_inference(name: str) -> None:
    """Statistics are few bytes."""
    for mode in plans_of(name, Target.cuda()):
        forward = {step.kernel.name for step in mode.forward.kernels}
        mine = {step.kernel.name for step in mode.inference.kernels}
        assert mine and mine <= forward, mode.name


@pytest.mark.parametrize("name", ["relu", "norm", "pool"])
def test_kernels_that_store_much_more_stay_with_forward(name: str) -> None:
    """A mask is an eighth of what ReLU moves: inference has kernels of its own."""
    for mode in plans_of(name, Target.cuda()):
        forward = {step.kernel.name for step in mode.forward.kernels}
        assert not {step.kernel.name for step in mode.inference.kernels} <= forward, mode.name


def test_a_kernel_that_computes_much_more_stays_with_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inference, "MOST_MORE_BYTES", 1)
    (mode, *_) = plans_of("relu", Target.host())
    (maker,) = mode.forward.kernels
    sizes = mode.program.example_sizes
    assert with_kernels_of(mode.forward, mode.inference, sizes) != mode.inference
    assert isinstance(maker.kernel, LoopKernel)
    last = next(item for item in maker.kernel.body if isinstance(item, Store))
    more = [replace(item, name="") for item in maker.kernel.body if not isinstance(item, Store)]
    heavy = replace(maker.kernel, body=(*maker.kernel.body[:-1], *more[-1:] * 100, last))
    changed = replace(mode.forward, steps=(replace(maker, kernel=heavy),))
    assert with_kernels_of(changed, mode.inference, sizes) == mode.inference


def test_a_kernel_of_other_inputs_stays() -> None:
    (mode, *_) = plans_of("relu", Target.host())
    steps = tuple(
        replace(step, inputs=("other",)) if isinstance(step, Fused) else step
        for step in mode.forward.steps
    )
    changed = replace(mode.forward, steps=steps)
    assert with_kernels_of(changed, mode.inference, {"s0": 64}) == mode.inference


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_saved_is_not_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, so that it can run here; whatever they store."""
    monkeypatch.setattr(inference, "MOST_MORE_BYTES", 1)
    monkeypatch.setattr(planning, "_skips_stores", lambda target: True)
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    fast = fusewright.optimize(model, x)
    for training in (True, False):
        model.train(training)
        fast.train(training)
        with torch.no_grad():
            close(fast(x), model(x), 1e-5)
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        fast(mine).square().sum().backward()
        model(theirs).square().sum().backward()
        close(mine.grad, theirs.grad, 1e-4)
    assert fast.explain()


def test_forward_does_inference_where_they_have_steps_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Max pooling stores where its maxima are, for backward alone; the rest is common."""
    monkeypatch.setattr(inference, "MOST_MORE_BYTES", 1)
    monkeypatch.setattr(planning, "_skips_stores", lambda target: True)
    make, shape = MODELS["pool"]
    model, args = make(), (torch.randn(shape),)
    made = prepare(model, args, device=torch.device("cpu"), target=Target.host())
    bundle = ModuleBundle("pool", "host", made.source, arguments_of(model, args), made.modes)
    text = module_text(bundle)
    assert "def _forward(" in text.drivers and "saves=True):" in text.drivers
    assert "def _inference" not in text.drivers
    assert "return _forward(*tensors, saves=False)[:1]" in text.tables
    assert "    if saves:\n" in text.drivers and "    else:\n" in text.drivers


def test_statistics_are_not_stored_without_gradients() -> None:
    """Inference calls forward's kernel, and wants the norm's result alone."""
    make, shape = MODELS["norm alone"]
    model, args = make(), (torch.randn(shape),)
    made = prepare(model, args, device=torch.device("cpu"), target=Target.cuda())
    bundle = ModuleBundle("norm", "cuda", made.source, arguments_of(model, args), made.modes)
    text = module_text(bundle).drivers
    assert text.count(" = custom_") == 1 + sum("custom_" in line for line in _backward(text))
    assert "saves" in text.partition("want=(")[2].partition(")")[0]


def _backward(text: str) -> list[str]:
    return text.partition("def _backward")[2].splitlines()
