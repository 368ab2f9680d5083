"""Methods that Dynamo does not guard, in code that the example did not run; eager is the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile import front
from fusewright.compile.engine import engine_of
from fusewright.compile.module import Optimized
from fusewright.compile.places import MOST_MADE

SETTINGS = {"scale": 2.0}  # for its sake, calls go through Dynamo


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Rule:
    def __call__(self, x: Tensor) -> Tensor:
        return self.get(x)

    def get(self, x: Tensor) -> Tensor:
        return x + 1


class Part(nn.Module):
    def half(self, x: Tensor) -> Tensor:
        return x / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.half(x)


class Other(nn.Module):
    def third(self, x: Tensor) -> Tensor:
        return x / 3

    def forward(self, x: Tensor) -> Tensor:
        return self.third(x)


class Branches(nn.Module):
    """The example takes the branch for large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.part: nn.Module = Part()
        self.rule = Rule()

    def large(self, x: Tensor) -> Tensor:
        return x * 2

    def small(self, x: Tensor) -> Tensor:
        return self.rule(self.part(x)) * 3

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu() * SETTINGS["scale"]
        return self.large(x) if x.shape[0] > 3 else self.small(x)


def same(fast: nn.Module, x: Tensor) -> None:
    assert isinstance(fast, Optimized)
    torch.testing.assert_close(fast(x), fast._fw_original.forward(fast, x))


METHODS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "of the model": (Branches, "small", lambda self, x: x * 7),
    "of a submodule": (Part, "half", lambda self, x: x * 7),
    "of an object": (Rule, "get", lambda self, x: x * 7),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_in_another_branch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = fusewright.optimize(Branches(), torch.randn(5, 4)), torch.randn(3, 4)
    second = fusewright.optimize(Branches(), torch.randn(5, 4))
    same(fast, x)
    same(second, x)  # finds what Dynamo compiled for the first one
    monkeypatch.setattr(*METHODS[name])
    for each in (fast, second):
        same(each, x)
    assert not fusewright.explain(fast).fallbacks


def test_a_method_of_a_submodule_that_was_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = fusewright.optimize(Branches(), torch.randn(5, 4)), torch.randn(3, 4)
    fast.part = Other()
    same(fast, x)
    monkeypatch.setattr(Other, "third", lambda self, x: x * 7)
    same(fast, x)
    monkeypatch.setattr(Other, "forward", lambda self, x: x * 9)
    same(fast, x)


def test_a_class_has_few_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "MOST_VERSIONS", 2)
    x = torch.randn(5, 4)
    fast = fusewright.optimize(Branches(), x)
    for factor in (2, 3, 4, 3, 2):
        monkeypatch.setattr(Branches, "large", lambda self, x, by=factor: x * by)
        same(fast, x)
        assert len(front._VERSIONS[Branches]) <= 2
    assert len(front.dynamo_graphs(Branches)) <= 2
    engine = engine_of(fast)
    assert engine is not None and engine.places.made == 5  # the first one was dropped


class Signed(nn.Module):
    """Dynamo runs it, because it asks for a fact of a tensor. It reads the sign of a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = 0.0
        self.unread = [0.0] * 4
        self.inner = nn.Identity()

    def factor(self) -> float:
        value = self.value if isinstance(self.value, float) else self.value[-1]
        return math.copysign(2.0, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.factor()) if x.grad is None else x


class Flips(Signed):
    """Changes the sign itself, and then breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.factor()
        self.value = -self.value
        torch._dynamo.graph_break()
        return self.inner(y) if x.grad is None else x


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    "values",
    [
        (0.0, -0.0, 0.0, 1.0, -0.0, (1.0, 0.0), (1.0, -0.0), [-0.0], [0.0], -1.0),
        ((0.0, 0.0), (1.0, 0.0), (-0.0, -0.0)),
        ([0.0, 0.0], [1.0, 0.0], [-0.0, -0.0]),
    ],
)
def test_the_sign_of_a_zero_is_noticed_though_dynamo_takes_it_for_equal(values: Any) -> None:
    model, x = Signed(), torch.randn(3, requires_grad=True)
    fast = fusewright.optimize(Signed(), x)
    for value in values:
        model.value = fast.value = value
        torch.testing.assert_close(fast(x), model(x))
    assert not fast.__dict__["_fw_engine"].failed


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_sign_that_forward_changes_before_a_break() -> None:
    model, x = Flips(), torch.randn(3, requires_grad=True)
    fast = fusewright.optimize(Flips(), x)
    for _ in range(6):
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_zeros_that_forward_does_not_read_make_no_versions() -> None:
    x = torch.randn(3, requires_grad=True)
    fast = fusewright.optimize(Signed(), x)
    for at in range(2 * MOST_MADE):
        fast.unread = [-0.0 if at >> bit & 1 else 0.0 for bit in range(4)]
        torch.testing.assert_close(fast(x), x * 2)
    assert engine_of(fast).places.made <= 1  # type: ignore[union-attr]
