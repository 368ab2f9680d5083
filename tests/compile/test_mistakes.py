"""A bug of ours: the model runs as in eager mode, and a warning asks to report it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile import loading, pipeline
from fusewright.errors import CodegenError, GraphError, InternalError

pytestmark = pytest.mark.has_a_bug

Break = Callable[[type[Exception]], None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * 2


@pytest.fixture(params=["plan_programs", "chosen", "render", "module_text"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes one stage fail from now on."""
    stage = request.param

    def break_now(kind: type[Exception]) -> None:
        def fails(*given: Any, **named: Any) -> Any:
            raise kind("no such thing\nand more")

        monkeypatch.setattr(loading if stage == "module_text" else pipeline, stage, fails)

    return break_now


def same_as_eager(fast: nn.Module, model: nn.Module, rows: int = 3) -> None:
    x = torch.randn(rows, 4)
    results = []
    for each in (fast, model):
        each.zero_grad()
        given = x.clone().requires_grad_()
        each(given).sum().backward()
        results.append((each(x).detach(), given.grad, [p.grad for p in each.parameters()]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", [KeyError, AssertionError, GraphError, CodegenError])
def test_optimize_runs_the_original(broken: Break, kind: type[Exception]) -> None:
    broken(kind)
    model = Model()
    with pytest.warns(RuntimeWarning, match="original forward runs: .*a bug in Fusewright"):
        fast = fusewright.optimize(copy.deepcopy(model), torch.randn(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        same_as_eager(fast, model)


@pytest.mark.parametrize("kind", [KeyError, GraphError])
def test_a_later_call_runs_the_original(broken: Break, kind: type[Exception]) -> None:
    model = Model()
    fast = fusewright.optimize(copy.deepcopy(model), torch.randn(3, 4))
    broken(kind)
    with pytest.warns(RuntimeWarning, match="no kernels for this call: .*a bug in Fusewright"):
        assert fast(torch.randn(2, 3, 4)).shape == (2, 3, 4)
    same_as_eager(fast, model)


@pytest.mark.parametrize("kind", [KeyError, GraphError])
def test_pytorch_runs_a_graph_of_torch_compile(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        raise kind("no such thing")

    monkeypatch.setattr(pipeline, "render", fails)
    torch._dynamo.reset()
    model = Model()
    fast = torch.compile(copy.deepcopy(model), backend="fusewright")
    with pytest.warns(RuntimeWarning, match="PyTorch runs this .* graph.*a bug in Fusewright"):
        same_as_eager(fast, model)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_want_of_memory_is_no_bug(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        raise kind("too much")

    monkeypatch.setattr(pipeline, "plan_programs", fails)
    with pytest.raises(kind, match="too much"):
        fusewright.optimize(Model(), torch.randn(3, 4))


def test_the_words_and_the_cause() -> None:
    error = InternalError("planning failed\nin these lines")
    words = "planning failed. This is a bug in Fusewright: please report it\nin these lines"
    assert str(error) == words
