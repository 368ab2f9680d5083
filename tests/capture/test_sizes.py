"""Symbolic sizes that remember their arithmetic, and results that are built once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusewright.capture import capture
from fusewright.capture.fake_results import compared_once
from fusewright.capture.sizes import remembered
from tests.support.models import Lambda


def counted(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """A list that gets an item with every call of a method."""
    calls: list[int] = []
    plain: Callable[..., Any] = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    patch.setattr(owner, name, run)
    return calls


def symbolic(fake_mode: FakeTensorMode) -> Tensor:
    """A fake of shape (s, 4), where s is 6 in the example."""
    from torch._dynamo.source import ConstantSource

    sizes = [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None, None])
    given = torch.zeros(6, 4)
    return fake_mode.from_tensor(given, symbolic_context=context, source=ConstantSource("x"))


def first_size(shape_env: ShapeEnv) -> Any:
    return symbolic(FakeTensorMode(shape_env=shape_env)).shape[0]


def test_the_same_question_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape_env = ShapeEnv(specialize_zero_one=False)
    size = first_size(shape_env)
    calls = counted(monkeypatch, SymNode, "_mul")
    with remembered(shape_env):
        first, second = size * 5, size * 5
        assert len(calls) == 1
        assert str(first) == str(second) == str(size * 5)
        assert first.node is not second.node  # a tracer follows nodes by their identity
        assert first.node.hint == second.node.hint == 30
    assert str(size * 5) == str(first)
    assert len(calls) == 2  # and not remembered any longer


def test_answers_change_with_what_is_known_of_a_symbol() -> None:
    shape_env = ShapeEnv(specialize_zero_one=False)
    size = first_size(shape_env)
    with remembered(shape_env):
        assert (size * 2).node.maybe_as_int() is None
        assert int(size) == 6  # fixes the symbol
        assert (size * 2).node.maybe_as_int() == 12
        assert (size + 1).node.maybe_as_int() == 7


def test_another_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = (ShapeEnv(specialize_zero_one=False) for _ in range(2))
    size = first_size(other)
    calls = counted(monkeypatch, SymNode, "_mul")
    with remembered(mine):
        assert str(size * 5) == str(size * 5)
    assert len(calls) == 2


class Shifted(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1, 4))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and x.shape[0] > 5:
            return (x + self.shift) * 2
        return x + self.shift


@pytest.mark.parametrize(("asks", "guards"), [(False, ()), (True, ("(s0 > 5)",))])
def test_a_guard_knows_who_asked(asks: bool, guards: tuple[str, ...]) -> None:
    """Broadcasting asks whether a size is one; that needs no guard. A forward's question does."""
    program = capture(Shifted(asks), (torch.zeros(8, 4),), mode="train")
    assert program.guards == guards


def test_results_are_built_twice_for_the_first_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, FakeTensorMode, "_get_output_tensor_from_cache_entry")
    built = []
    for compare in (False, True):
        shape_env = ShapeEnv(specialize_zero_one=False)
        fake_mode = FakeTensorMode(shape_env=shape_env)
        x = symbolic(fake_mode)
        before = len(calls)
        with fake_mode, compared_once(fake_mode if compare else FakeTensorMode()):
            found = [x.mul(2), x.sin(), x.cos(), x.t(), x.exp().t(), x.sin()]
        built.append(len(calls) - before)
        assert all(type(each) is FakeTensor for each in found)
        shapes = [tuple(map(str, each.shape)) for each in found]
        name = str(x.shape[0])
        assert shapes == [(name, "4")] * 3 + [("4", name)] * 2 + [(name, "4")]
        assert [each.stride() for each in found[:4]] == [(4, 1)] * 3 + [(1, 4)]
        assert found[3].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert built[0] > built[1] >= 2  # the first sine, the first view, and the second sine


def test_a_tracer_follows_no_sizes_of_memory() -> None:
    """Each step that it follows takes a name of its operator, so names tell: there are no gaps."""
    model = Lambda(lambda x: torch.relu(x * 2 + 1) * 3 + x.sum())
    program = capture(model, (torch.randn(6, 4),), mode="train")
    names = [node.name for node in program.forward.nodes]
    assert names[:6] == ["mul", "add", "relu", "mul_1", "sum_1", "add_1"]
