"""What Dynamo of older PyTorch does not guard: each call looks at it, and the kernels still run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture import unguarded
from fusewright.capture.beside import Beside, together
from fusewright.compile.engine import engine_of
from fusewright.compile.places import MOST_MADE


@pytest.fixture(autouse=True)
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As before PyTorch 2.12."""
    monkeypatch.setattr(unguarded, "_OLD", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decorated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(function)
    def around(x: Tensor) -> Tensor:
        return function(x) + 1

    return around


class Table:
    """As packages keep their functions: in a dictionary of an object."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {"act": decorated(torch.tanh)}


TABLE = Table()


class Looked(nn.Module):
    """Calls a decorated function that it finds in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = TABLE.held["act"](self.layer(x).relu())
        return y


class Asks(nn.Module):
    """Asks whether its weight is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.settings = Table()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(self.layer(x)) + len(self.settings.held)
        return y * 2 if self.other.weight.requires_grad else y


def assert_by_our_kernels(fast: nn.Module) -> None:
    told = fusewright.explain(fast)
    assert told.graphs and not told.fallbacks


def test_a_decorated_function_in_a_table() -> None:
    model, x = Looked(), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x))
    assert_by_our_kernels(fast)


def test_a_model_that_asks_for_gradients_of_its_own_tensors() -> None:
    model, x = Asks(), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    for wanted in (True, False, True, False):
        model.other.weight.requires_grad_(wanted)
        for each in (fast, copy.deepcopy(fast)):
            torch.testing.assert_close(each(x), model(x))
    assert_by_our_kernels(fast)


@pytest.mark.filterwarnings("ignore:the original forward runs")
def test_an_enclosed_number_that_changes_at_each_call() -> None:
    count = 0

    class Counts(Asks):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x).relu() * count + len(self.settings.held)
            return y

    model, x = Counts(), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    for count in range(MOST_MADE + 4):  # noqa: B007
        torch.testing.assert_close(fast(x), model(x))
    engine = engine_of(fast)
    assert engine is not None and engine.places.made == MOST_MADE + 1
    assert "too often" in engine.failed


def test_states_tell_apart_what_a_program_would() -> None:
    value: Any = 1

    def read() -> Any:
        return value

    cell = (read.__closure__ or ())[0]
    module = nn.Linear(2, 2)
    both = together((Beside((cell,)), Beside(gradients=True), Beside((cell,))))
    assert both == Beside((cell,), gradients=True)
    seen = {both.state(module)}
    for value in (1.0, True, 2, read, None, []):  # noqa: B007
        seen.add(both.state(module))
    module.bias.requires_grad_(False)
    seen.add(both.state(module))
    module.loose = torch.ones(1, requires_grad=True)
    seen.add(both.state(module))
    assert len(seen) == 9
