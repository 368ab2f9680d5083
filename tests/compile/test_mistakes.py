"""A bug of ours: the model runs as in eager mode, and a warning asks to report it."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile import loading, pipeline
from fusewright.compile.mistakes import reported
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


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", [KeyError, AssertionError, GraphError, CodegenError])
def test_optimize_runs_the_original(broken: Break, kind: type[Exception], check: bool) -> None:
    broken(kind)
    model = Model()
    with pytest.warns(RuntimeWarning, match="forward runs: Model: .*a bug in Fusewright"):
        fast = fusewright.optimize(copy.deepcopy(model), torch.randn(3, 4), check=check)
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


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("too much"),
        torch.OutOfMemoryError("too much"),
        RuntimeError("can't allocate memory: too much"),
        OSError("too much: no space left on device"),
    ],
)
def test_want_of_memory_is_no_bug(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        raise error

    monkeypatch.setattr(pipeline, "plan_programs", fails)
    with pytest.raises(type(error), match="too much"):
        fusewright.optimize(Model(), torch.randn(3, 4))


def test_the_words_and_the_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = "This is a bug in Fusewright: please report it"
    error = InternalError("planning failed: AssertionError: \nin these lines")
    assert str(error) == f"planning failed: AssertionError. {asks}\nin these lines"
    assert str(InternalError(str(error))) == str(error)
    monkeypatch.setenv("FUSEWRIGHT_DEBUG", "1")
    with pytest.raises(InternalError) as raised, reported("planning"):
        {}["missing"]
    words = r"planning failed in test_mistakes.py, line \d+: KeyError: 'missing'"
    assert re.fullmatch(rf"{words}\. {asks}", str(raised.value))
    assert isinstance(raised.value.__cause__, KeyError)
    assert "Traceback (most recent call last)" in capsys.readouterr().err
