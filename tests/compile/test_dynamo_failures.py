"""A call on which Dynamo fails gives the right result, or an error, and never effects twice."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError, Unsupported

import fusewright
from fusewright.compile import backend


class Reads(nn.Module):
    """Its forward is a function of one tensor."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x)


def of_grad(x: Tensor) -> Tensor:
    """Dynamo guards what this reads; we do not."""
    return x * 2 if x.grad is None else x @ x


class Part(nn.Module):
    """Counts its calls in an object; this splits the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = SimpleNamespace(n=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.n += 1
        return x * self.calls.n


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(os.environ.get("FUSEWRIGHT_TEST_FACTOR", "3"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Part(), Last()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x))


def engine(module: nn.Module) -> Any:
    return module.__dict__["_fw_engine"]


def test_an_error_of_dynamo_itself() -> None:
    leaf = torch.randn(3, requires_grad=True)
    fast = fusewright.optimize(Reads(of_grad), leaf)
    tried: list[int] = []

    def fails(*_: Any) -> Any:
        def run(*args: Any) -> Any:
            tried.append(1)
            raise InternalTorchDynamoError("an assertion")

        return run

    engine(fast).front = fails
    with pytest.warns(RuntimeWarning, match="Dynamo fails on this model: an assertion"):
        torch.testing.assert_close(fast(leaf), leaf * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(leaf), leaf * 2)
    assert len(tried) == 1


def test_an_error_of_eager_stays_eagers() -> None:
    leaf = torch.randn(3, requires_grad=True)
    fast = fusewright.optimize(Reads(of_grad), leaf)
    bad = torch.randn(3, 4, requires_grad=True)
    bad.grad = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        fast(bad)
    torch.testing.assert_close(fast(leaf), leaf * 2)
    assert not engine(fast).failed


def test_variables_of_the_environment_after_a_split_of_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Model(), torch.linspace(-1, 1, 4)
    fast = fusewright.optimize(Model(), x)
    for value in ("3", "5", "5", "7"):
        monkeypatch.setenv("FUSEWRIGHT_TEST_FACTOR", value)
        torch.testing.assert_close(fast(x), model(x))
        assert fast.part.calls.n == model.part.calls.n
    assert not engine(fast).failed


def test_a_failure_after_a_part_of_forward_does_not_run_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.linspace(-1, 1, 4)
    fast, real = fusewright.optimize(Model(), x), backend.compile_graph

    def fails(*args: Any, **kwargs: Any) -> Any:
        if fast.part.calls.n:
            raise AssertionError("a mistake of ours")
        return real(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_graph", fails)
    with pytest.warns(RuntimeWarning, match="eager mode runs a graph: it .* a mistake of ours"):
        torch.testing.assert_close(fast(x), x * 1 * 3)
    assert fast.part.calls.n == 1
    torch.testing.assert_close(fast(x), x * 2 * 3)
    assert fast.part.calls.n == 2
    assert "a mistake of ours" in str(fusewright.explain(fast))


def test_what_dynamo_refuses_after_a_part_of_forward_does_not_run_it_again() -> None:
    class Strict(Model):
        def forward(self, x: Tensor) -> Tensor:
            return strict(self.part(x))

    def strict(x: Tensor) -> Tensor:
        with torch._dynamo.error_on_graph_break(True):
            torch._dynamo.graph_break()
            return x * 3

    x = torch.linspace(-1, 1, 4)
    fast = fusewright.optimize(Strict(), x)
    with pytest.raises(Unsupported):
        fast(x)
    assert fast.part.calls.n == 1
    with pytest.warns(RuntimeWarning, match="Dynamo fails on this model"):
        torch.testing.assert_close(fast(x), x * 2 * 3)
    assert fast.part.calls.n == 2


def breaks(x: Tensor) -> Tensor:
    """Dynamo refuses this; eager mode runs it."""
    with torch._dynamo.error_on_graph_break(True):
        torch._dynamo.graph_break()
        return x * 3


class Refused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return breaks(x) if x.grad is None else x


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("model", [Refused(), nn.Sequential(nn.Identity(), Refused())])
def test_what_dynamo_refuses_before_anything_ran_runs_as_in_eager_mode(model: nn.Module) -> None:
    x = torch.linspace(-1, 1, 4)
    fast = fusewright.optimize(model, x)
    with pytest.warns(RuntimeWarning, match="Dynamo fails on this model"):
        torch.testing.assert_close(fast(x), x * 3)


class Untraced(contextlib.ContextDecorator):
    """A decorator that Dynamo does not trace: its effects are there before Dynamo begins."""

    @torch._dynamo.disable
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class Decorated(Refused):
    forward = Untraced()(Refused.forward)


class WithoutGradients(Refused):
    forward = torch.no_grad()(Refused.forward)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:the original forward runs")
def test_only_decorators_of_pytorch_may_run_again() -> None:
    x = torch.linspace(-1, 1, 4)
    with pytest.raises(Unsupported):
        fusewright.optimize(Decorated(), x)(x)
    torch.testing.assert_close(fusewright.optimize(WithoutGradients(), x)(x), x * 3)
