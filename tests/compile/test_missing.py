"""What forward looks for in vain, and what it finds by going through a table: eager is the truth.

Neither our guards nor Dynamo's notice that a missing name is there, if forward caught the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright

TABLE: dict[str, float] = {}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    TABLE.clear()
    globals().pop("ABSENT", None)
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.settings = SimpleNamespace()
        self.layer = nn.Linear(4, 4)
        self.table = nn.ParameterDict({"a": torch.ones(4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self, x)


def _own_attribute(m: Any, x: Tensor) -> Any:
    try:
        return m.scale
    except AttributeError:
        return 2.0


def _attribute_of_an_object(m: Any, x: Tensor) -> Any:
    try:
        return m.settings.scale
    except AttributeError:
        return 2.0


def _key(m: Any, x: Tensor) -> Any:
    try:
        return TABLE["k"]
    except KeyError:
        return 2.0


def _suppressed(m: Any, x: Tensor) -> Any:
    found = 2.0
    with contextlib.suppress(KeyError):
        found = TABLE["k"]
    return found


def _caught_whatever_it_is(m: Any, x: Tensor) -> Any:
    torch._dynamo.graph_break()
    try:
        return TABLE["k"]
    except:  # noqa: E722  (models do that)
        return 2.0


def _global(m: Any, x: Tensor) -> Any:
    try:
        return ABSENT  # type: ignore[name-defined]
    except NameError:
        return 2.0


def _first_parameter(m: Any, x: Tensor) -> Any:
    try:
        return next(m.layer.buffers())
    except StopIteration:
        return 2.0


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "own attribute": (_own_attribute, lambda m: setattr(m, "scale", 3.0)),
    "attribute of an object": (
        _attribute_of_an_object,
        lambda m: setattr(m.settings, "scale", 3.0),
    ),
    "key": (_key, lambda m: TABLE.update(k=3.0)),
    "suppressed": (_suppressed, lambda m: TABLE.update(k=3.0)),
    "caught whatever it is": (_caught_whatever_it_is, lambda m: TABLE.update(k=3.0)),
    "global": (_global, lambda m: globals().update(ABSENT=3.0)),
    "first buffer": (
        _first_parameter,
        lambda m: m.layer.register_buffer("first", torch.full((4,), 3.0)),
    ),
    "globals": (
        lambda m, x: globals().get("ABSENT", 2.0),
        lambda m: globals().update(ABSENT=3.0),
    ),
    "all parameters": (
        lambda m, x: sum(each.square().sum() for each in m.parameters()),
        lambda m: m.layer.register_parameter("more", nn.Parameter(torch.ones(4))),
    ),
    "names of buffers": (
        lambda m, x: 3.0 if "more" in dict(m.named_buffers()) else 2.0,
        lambda m: m.register_buffer("more", torch.ones(4)),
    ),
    "table of parameters": (
        lambda m, x: sum(m.table.values()),
        lambda m: m.table.update({"b": torch.full((4,), 3.0)}),
    ),
}


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.parametrize("name", CASES)
def test_what_was_missing_is_found_when_it_is_there(name: str) -> None:
    read, change = CASES[name]
    model, x = Model(read), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x))
    before = fast(x)
    change(fast)
    wanted = Model.forward(fast, x)  # the original forward over the same state
    assert not torch.allclose(wanted, before)
    torch.testing.assert_close(fast(x), wanted)


# What a tensor says of itself, which no guard compares.
FACTS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Tensor]]] = {
    "storage_offset": (lambda m, x: 1.0 + x.storage_offset(), lambda: torch.ones(5, 4)[2:]),
    "_base": (lambda m, x: 2.0 if x._base is None else 3.0, lambda: torch.ones(5, 4)[2:]),
    "grad_fn": (
        lambda m, x: 2.0 if x.grad_fn is None else 3.0,
        lambda: torch.ones(3, 4, requires_grad=True) * 1,
    ),
}


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_tensor_that_no_guard_compares(name: str) -> None:
    read, other = FACTS[name]
    model, x, y = Model(read), torch.ones(3, 4), other()
    fast = fusewright.optimize(model, x)
    assert not torch.allclose(model(x), model(y))
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast(y), model(y))


class _Scaled(nn.Module):
    """Its calls do something beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x * 2, x)
        return result + 1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x).relu() * y


def test_a_class_with_a_call_of_its_own() -> None:
    model, x = _Scaled(), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))
    assert any(each.kernels for each in fusewright.explain(fast).graphs)


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return x * self.scale, y * 2


def _apart() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 4), torch.ones(16)


def _together() -> tuple[Tensor, Tensor]:
    memory = torch.ones(4, 4)
    return memory, memory.view(-1)


@pytest.mark.parametrize("first", [_apart, _together])
def test_arguments_that_share_memory_now_and_then(first: Callable[[], Any]) -> None:
    model = _Writes()
    fast = fusewright.optimize(model, first())
    for make in (first, _apart, _together, _apart):
        mine, eagers = make(), make()
        torch.testing.assert_close(fast(*mine), model(*eagers))
        torch.testing.assert_close(mine, eagers)
