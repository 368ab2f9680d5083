"""Modules that run on CUDA kernels built by g++, and comparisons of them with eager mode."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen.source import Source
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.loading import kernels_of, load
from fusewright.compile.module import optimized
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import Prepared
from fusewright.emit.bundle import ModuleBundle
from fusewright.plan import prologues, staged_pairs
from fusewright.rewrite import convolutions
from fusewright.schedule import tensor_core
from tests.support import loop_runs

TRAINED, INFERRED = ("forward", "backward"), ("inference",)  # plans that a call with gradients runs


def use_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all convolutions, small ones too, on tensor cores."""
    for each in ("is_worthwhile", "gradient_pays"):
        monkeypatch.setattr(convolutions, each, lambda *_: True)
    for module in (convolutions, tensor_core):
        monkeypatch.setattr(module, "prefers_direct", lambda *_: False)


def share_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gradients of all convolutions read one staged input and compute the loop before it."""
    use_tensor_cores(monkeypatch)
    monkeypatch.setattr(staged_pairs, "prefers_shared", lambda *_: True)
    monkeypatch.setattr(prologues, "prefers_computed", lambda *_: True)


def on_library(
    model: nn.Module,
    x: Tensor | Sequence[Tensor],
    prepared: Prepared,
    source: Source,
    plans: Sequence[str] = TRAINED,
) -> nn.Module:
    """A copy of the model on kernels that g++ builds from this source: only those of the plans
    that a test runs."""
    mode = "train" if model.training else "eval"
    modes = tuple(replace(each, owners=owners_of(model, mode)) for each in prepared.modes[:1])
    inputs = (x,) if isinstance(x, Tensor) else tuple(x)
    bundle = ModuleBundle("emulated", "host", source, arguments_of(model, inputs), modes)
    run = [plan for plan in (getattr(modes[0], each) for each in plans) if plan is not None]
    built = of_kernels(source, {step.kernel.name for plan in run for step in plan.kernels})
    kernels = kernels_of(
        built, lambda text: loop_runs.compile_source(replace(built, text=text), loop_runs.EMULATED)
    )
    return optimized(copy.deepcopy(model), load(bundle, kernels))


def of_kernels(source: Source, names: set[str]) -> Source:
    """The source with the entries of these kernels only. Templates of the others are not
    instantiated, which would take most of the compiler's time."""
    others = sorted({each.name for each in source.entries} - names)
    if not others:
        return source
    whole = re.compile(rf"^FW_ENTRY\(({'|'.join(others)}),.*?^}}\n", re.DOTALL | re.MULTILINE)
    assert sorted(whole.findall(source.text)) == others
    text = whole.sub("", source.text)
    return Source(source.language, text, tuple(e for e in source.entries if e.name in names))


def trained(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of the inputs and of every used parameter."""
    given = [x.clone().requires_grad_() for x in inputs]
    made = model(*given)
    made = made if isinstance(made, tuple) else (made,)
    total = sum((out * _weights(out)).sum() for out in made)
    wanted = [*given, *model.parameters()]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
    return [each.detach() for each in (*made, *gradients) if each is not None]


def _weights(out: Tensor) -> Tensor:
    numbers = torch.arange(out.numel(), device=out.device) / max(1, out.numel())
    return numbers.view_as(out).to(out.dtype)


def gradients_alone(
    fast: nn.Module, model: nn.Module, x: Tensor, wanted: str
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of both modules, where only the "input" or only the "weights" require any."""
    given = x.detach().requires_grad_(wanted == "input")
    results = []
    for each in (fast, model):
        each.requires_grad_(wanted == "weights")
        leaves = [given] if wanted == "input" else list(each.parameters())
        results.append(torch.autograd.grad(each(given).square().sum(), leaves))
    return list(zip(*results, strict=True))


def as_exact_as_eager(
    fast: nn.Module, model: nn.Module, x: Tensor | Sequence[Tensor], least: float
) -> None:
    """Errors against float64 at most twice eager's, or `least`."""
    inputs = (x,) if isinstance(x, Tensor) else tuple(x)
    exactly, doubles = copy.deepcopy(model).double(), [x.double() for x in inputs]
    ours, eager = trained(fast, *inputs), trained(model, *inputs)
    truth = trained(exactly, *doubles)
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        allowed = max(least, 2.0 * float((theirs.double() - exact).norm() / exact.norm()))
        assert float((mine.double() - exact).norm() / exact.norm()) <= allowed
