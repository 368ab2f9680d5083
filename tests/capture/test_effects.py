"""Operators with effects besides their results: the checks of torch.linalg, forward and
backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

import fusewright
from fusewright.capture import capture
from fusewright.capture.graphs import back_end
from fusewright.compile.backend import compile_graph
from tests.support.emitted_files import emitted


class Weighted(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of
        self.weight = nn.Parameter(torch.randn(4, 4) + 3 * torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x @ self.weight) * 2


class InverseBehind(torch.autograd.Function):
    """Its check is in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        product: Tensor = tangent @ torch.linalg.inv(x)
        return product


def inverse_unread(x: Tensor) -> Tensor:
    torch.linalg.inv(x)
    return x.relu()


CHECKED: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x.cos()),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT),
    "two": lambda x: torch.linalg.inv(x) + torch.linalg.cholesky(x @ x.mT),
    "unread": inverse_unread,
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("name", CHECKED)
def test_a_checked_operator_is_called_and_a_singular_matrix_is_pytorchs_error(name: str) -> None:
    torch.manual_seed(0)
    model = Weighted(CHECKED[name]).double()
    x = torch.randn(3, 4, 4).double() + 3 * torch.eye(4)
    fast = fusewright.optimize(model, x)
    for training in (True, False):
        model.train(training)
        fast.train(training)
        for batch in (x, torch.cat([x, x.flip(0)])):
            for mine, theirs in zip(gradients(fast, batch), gradients(model, batch), strict=True):
                torch.testing.assert_close(mine, theirs)
            with torch.no_grad():
                torch.testing.assert_close(fast(batch), model(batch))
        for run in (model, fast):
            with pytest.raises(LinAlgError, match="Batch element 0"):
                run(torch.zeros_like(x))


@pytest.mark.parametrize("name", CHECKED)
def test_graphs_of_dynamo_check_too(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Weighted(CHECKED[name]).double()
    x = torch.randn(3, 4, 4).double() + 3 * torch.eye(4)
    kinds: list[str] = []

    def compiled(kind: str, module: torch.fx.GraphModule) -> Any:
        kinds.append(kind)
        return compile_graph(kind, module)

    fast: Any = torch.compile(model, backend=back_end(compiled))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # that PyTorch runs a graph
        for mine, theirs in zip(gradients(fast, x), gradients(model, x), strict=True):
            torch.testing.assert_close(mine, theirs)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
    assert kinds == ["forward", "backward", "inference"]
    with pytest.raises(LinAlgError, match="Batch element 0"):
        fast(torch.zeros_like(x))


def test_a_check_in_backward_runs_there() -> None:
    model = Weighted(lambda x: InverseBehind.apply(x))  # type: ignore[no-untyped-call]
    x = torch.randn(3, 4, 4) + 3 * torch.eye(4)
    program = capture(model, (x,), mode="train")
    assert program.backward is not None
    checks = [
        [node.op for node in graph.nodes if node.effect]
        for graph in (program.forward, program.backward)
    ]
    assert checks == [[], ["aten._linalg_check_errors.default"]]
    fast = fusewright.optimize(model, x, modes=("train",))
    for mine, theirs in zip(gradients(fast, x), gradients(model, x), strict=True):
        torch.testing.assert_close(mine, theirs)
    for run in (model, fast):
        y = run(torch.zeros(3, 4, 4))
        with pytest.raises(LinAlgError, match="Batch element 0"):
            y.sum().backward()


PROBLEM = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return torch.linalg.inv(x @ self.weight) * 2


def get_inputs():
    return [torch.randn(3, 4, 4) + 4 * torch.eye(4)]


def get_init_inputs():
    return []
"""


def test_the_emitted_file_checks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, names, args = emitted(PROBLEM, tmp_path, monkeypatch)
    assert "torch.ops.aten._linalg_check_errors.default(" in text
    eager, fast = names["Model"](), names["ModelNew"]()
    for mine, theirs in zip(gradients(fast, *args), gradients(eager, *args), strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(LinAlgError, match="inversion could not be completed"):
        fast(torch.zeros(3, 4, 4))


class HoldsOperator(nn.Module):
    """PyTorch's operators keep caches in themselves, which a first call fills."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.operator(x, x > 0.5, 2.0)
        return found + 1


@pytest.mark.parametrize("overload", [True, False])
def test_an_operator_in_an_attribute_is_no_state(overload: bool) -> None:
    packet = torch.ops.aten.native_dropout_backward
    model = HoldsOperator(packet.default if overload else packet)
    found = capture(model, (torch.rand(3, 4),), mode="eval").inference.nodes
    assert any("mul" in each.op for each in found)
    assert model.operator is (packet.default if overload else packet)
