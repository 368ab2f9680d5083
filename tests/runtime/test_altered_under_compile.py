"""An optimized module within an outer torch.compile: changes after the compilation are noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from tests.support.altered_models import CHANGES, eager_result, lambdas, made
from tests.support.tensors import assert_same

# Dynamo itself fails on a number that became a tensor.
UNDER_COMPILE = {name: each for name, each in CHANGES.items() if name != "a number as a tensor"}


@pytest.mark.parametrize("change", UNDER_COMPILE)
@pytest.mark.parametrize("where", ["program", "file"])
def test_a_module_under_torch_compile_notices(
    program: nn.Module, file: Callable[[], nn.Module], where: str, change: str
) -> None:
    torch._dynamo.reset()
    fast, x = copy.deepcopy(program) if where == "program" else file(), torch.randn(4, 3)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        before = compiled(x)
    assert_same(before, fast(x))
    UNDER_COMPILE[change](fast)
    assert_same(compiled(x), eager_result(fast, x))
    assert not torch.equal(compiled(x), before)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.line(x))


def test_a_method_is_hidden_under_torch_compile() -> None:
    torch._dynamo.reset()
    x, fast = torch.randn(4, 3), fusewright.optimize(Scaling(), torch.randn(4, 3))
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), fast.line(x) * 2)
    fast.scaled = lambda x: x * 11
    assert_same(compiled(x), fast.line(x) * 11)


@pytest.mark.parametrize("act", [torch.tanh, lambdas()[1]], ids=["PyTorch's", "of the user"])
def test_a_module_under_torch_compile_runs_its_kernels(act: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model, x = made(), torch.randn(4, 3)
    model.act = act
    fast = fusewright.optimize(model, x, modes=("train",))
    called: list[str] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    assert_same(torch.compile(fast, fullgraph=True, backend=noted)(x), eager_result(fast, x))
    assert [each for each in called if each.startswith("fusewright")]
