"""Kernels that few calls need are built when a call needs them, and not before."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import loop_kernels
from fusewright.codegen.source import Source
from fusewright.compile.pipeline import prepare
from fusewright.ir.graph import Dim
from fusewright.ir.loop import LoopKernel
from fusewright.kinds.registry import heuristic, render
from fusewright.target.target import Target
from tests.support import loop_runs
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import on_library, trained

ROWS, COLUMNS = 6, 64
S0, S1 = Dim(1, ("s0",)), Dim(1, ("s1",))
CUDA = Target.cuda()


class Block(nn.Module):
    """A row kernel with a weight, a pointwise chain and sums down the columns in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(COLUMNS)
        self.scale = nn.Parameter(torch.randn(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x * self.scale)) * x


def misaligned(x: Tensor) -> Tensor:
    """The same values, not at the beginning of a vector."""
    return torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)


class Loads:
    """Counts libraries with all kernels, and those without the rare ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.few = self.whole = 0
        compile_source = loop_runs.compile_source

        def counted(source: Source, *given: Any) -> Any:
            few = source.text.startswith("#define FW_RARE 0\n")
            self.few, self.whole = self.few + few, self.whole + (not few)
            return compile_source(source, *given)

        monkeypatch.setattr(loop_runs, "compile_source", counted)

    @property
    def counts(self) -> tuple[int, int]:
        return self.few, self.whole


def prepared_for(model: nn.Module, x: Tensor) -> Any:
    target = Target.cuda(tensor_cores=False)
    return prepare(model, (x,), modes=("train",), device=x.device, target=target)


def test_a_misaligned_call_builds_what_it_needs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, model, x = Loads(monkeypatch), Block(), torch.randn(ROWS, COLUMNS)
    ready = prepared_for(model, x)
    fast = on_library(model, x, ready, emulated(ready.source))
    want = trained(copy.deepcopy(model), x)
    torch.testing.assert_close(trained(fast, x), want, rtol=1e-5, atol=1e-5)
    assert loads.counts == (1, 0)
    for _ in range(2):
        again = misaligned(x).requires_grad_()
        assert again.data_ptr() % 16
        out = fast(again)
        (found,) = torch.autograd.grad(out.sum(), again)
        (wanted,) = torch.autograd.grad(model(leaf := x.clone().requires_grad_()).sum(), leaf)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert loads.counts == (1, 1)
    torch.testing.assert_close(trained(fast, x), want, rtol=1e-5, atol=1e-5)
    assert loads.counts == (1, 1)


def texts(loop: LoopKernel, **changes: Any) -> list[str]:
    """The drivers that are called, the rare ones with a mark."""
    sizes = {"s0": 8, "s1": 64}
    schedule = replace(heuristic(loop, CUDA, sizes), **changes)  # type: ignore[type-var]
    text = render([(loop, schedule)], CUDA).text.partition(f"FW_ENTRY({loop.name},")[2]
    calls = re.findall(r"^(#if FW_RARE\n)? *(?:if \(.*\) *)?return fw::(\w+<.*?>)\(", text, re.M)
    return [("rare " if mark else "") + call for mark, call in calls]


def test_only_calls_that_are_not_expected_are_rare() -> None:
    fixed = loop_kernels.bias_relu(S0, 1024)
    few, rare = texts(fixed)
    assert few.startswith("pointwise<int, 4,") and rare.startswith("rare pointwise<int64_t, 1,")
    # A batch that may grow beyond 32 bits: vectors serve it, single elements only misaligned ones.
    assert [each.split(",")[0] for each in texts(fixed, wide_index=True)] == [
        "pointwise<int", "pointwise<int64_t", "rare pointwise<int64_t",
    ]  # fmt: skip
    # Without vectors the size alone decides.
    assert [each.split("<")[0] for each in texts(fixed, lanes=1)] == ["pointwise", "rare pointwise"]
    assert not any("rare" in each for each in texts(fixed, lanes=1, wide_index=True))
    # Rows of any length are often not whole vectors.
    assert len(texts(loop_kernels.bias_relu(S0, S1))) == 2
    assert not any("rare" in each for each in texts(loop_kernels.bias_relu(S0, S1)))
