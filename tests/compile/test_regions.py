"""Parts of a model, functions and the decorator."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.compile import solution
from fusewright.compile.engine import engine_of
from fusewright.compile.module import Optimized
from fusewright.errors import CaptureError, ProblemError
from tests.support.composed import Block, eager, example, train


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the modules that were captured."""
    names: list[str] = []
    real = solution.solve

    def noted(*args: Any, **settings: Any) -> Any:
        names.append(settings["name"])
        return real(*args, **settings)

    monkeypatch.setattr(solution, "solve", noted)
    return names


class Stack(nn.Module):
    """Equal layers after a random layer and one that changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.wide = Block()
        self.wide.up = nn.Linear(8, 24)
        self.wide.down = nn.Linear(24, 8)
        self.spare = Block()

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        x = self.drop(self.norm(x)) * times
        for each in self.layers:
            x = each(x)
        y: Tensor = self.wide(x)
        return y


def _same_training(ours: Any, theirs: Any) -> None:
    """Two steps with the same random numbers."""
    for _ in range(2):
        torch.manual_seed(1)
        found = train(ours, ours)
        torch.manual_seed(1)
        wanted = train(theirs, theirs)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_submodule_in_place() -> None:
    model: Any = eager("programs")
    model.a = fusewright.optimize(model.a, example())
    model.b = fusewright.optimize(model.b, example())
    _same_training(model, eager("programs"))
    assert not model.a.explain().fallbacks and isinstance(model.a, Block)


def test_equal_parts_are_compiled_once(solved: list[str]) -> None:
    model = Stack()
    theirs, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    drawn = torch.get_rng_state()
    x = example()
    assert fusewright.optimize_parts(model, x, {"times": 2.0}, parts=Block) is model
    assert solved == ["Block", "Block"], "three equal layers and a wider one"
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn) and torch.equal(x, example())
    parts = [*model.layers, model.wide]
    assert all(isinstance(each, Optimized) for each in parts)
    assert not isinstance(model.spare, Optimized), "the example does not call it"
    _same_training(model, theirs)
    assert solved == ["Block", "Block"]
    engines = [engine_of(each) for each in model.layers]
    programs = [each.modes for each in engines if each is not None]
    assert programs[0] == programs[1] == programs[2]
    for each in model.layers:
        assert not fusewright.explain(each).fallbacks


def test_parts_that_differ_in_a_constant_are_not_equal(solved: list[str]) -> None:
    model: Any = nn.Sequential(*[Block() for _ in range(3)])
    model[1].norm.eps = 0.5
    theirs = copy.deepcopy(model)
    fusewright.optimize_parts(model, example(), parts=Block, modes=("train",))
    assert len(solved) == 2
    _same_training(model, theirs)
    model[0].norm.eps = theirs[0].norm.eps = 0.25  # a later change is one of that part alone
    _same_training(model, theirs)


def test_hooks_and_optimized_parts_do_not_see_the_example() -> None:
    model: Any = eager("programs")
    model.a = fusewright.optimize(model.a, example(), modes=("train",))
    seen: list[Any] = []
    model.b.register_forward_hook(lambda *call: seen.append(call))
    model.head.register_forward_hook(lambda *call: seen.append(call))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusewright.optimize_parts(model, example(), parts="b", modes=("train",))
        assert not seen
        _same_training(model, eager("programs"))
    assert len(seen) == 4, "both hooks, in both steps"
    assert isinstance(model.a, Optimized) and not model.a.explain().fallbacks


def test_parts_by_name() -> None:
    model: Any = eager("programs")
    fusewright.optimize_parts(model, example(), parts=("?", "head"), modes=("train",))
    assert all(isinstance(each, Optimized) for each in (model.a, model.b, model.head))
    assert not isinstance(model.a.up, Optimized)
    _same_training(model, eager("programs"))


@pytest.mark.parametrize("parts", ["nowhere", nn.Conv2d, (Block, "head.nowhere"), ()])
def test_parts_that_do_not_exist(parts: Any) -> None:
    with pytest.raises(ProblemError, match=r"no submodule of Net is .*; parts are classes"):
        fusewright.optimize_parts(eager("programs"), example(), parts=parts)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gated(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """A gate."""
    return F.silu(x) * y * scale


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("settings", [None, {"tune": False}])
def test_functions(settings: Any) -> None:
    """`@optimize` and `@optimize(tune=False)`."""
    decorator: Any = fusewright.optimize if settings is None else fusewright.optimize(**settings)
    fast = decorator(gated)
    assert inspect.signature(fast) == inspect.signature(gated) and fast.__doc__ == "A gate."
    for rows, scale in ((4, 1.0), (9, 3.0)):
        given = [example(rows, seed).requires_grad_() for seed in range(2)]
        found, wanted = fast(*given, scale=scale), gated(*given, scale=scale)
        gradients = [torch.autograd.grad(y.sin().sum(), given) for y in (found, wanted)]
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*gradients)


def test_what_is_refused() -> None:
    with pytest.raises(ProblemError, match="needs an example of the model's inputs"):
        fusewright.optimize(nn.ReLU())
    with pytest.raises(ProblemError, match="is a class; it takes"):
        fusewright.optimize(nn.ReLU, tune=True)
    with pytest.raises(ProblemError, match="is of type int; it takes"):
        fusewright.optimize(3)  # type: ignore[call-overload]


class Ordered(nn.Module):
    """Also holds its blocks in a list, which is no part of the module tree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Dropping(), Dropping()
        self.order = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for each in self.order:
            x = each(x)
        return x


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(self.linear(x)), 0.5, self.training)


def test_whoever_holds_a_part_keeps_it() -> None:
    model, x = Ordered(), torch.randn(4, 8)
    expected = copy.deepcopy(model).eval()(x)
    held = model.first
    fusewright.optimize_parts(model, x, parts=Dropping)
    assert model.first is held is model.order[0]
    assert fusewright.explain(held).graphs
    model.eval()
    torch.testing.assert_close(model(x), expected)


class Refusing(nn.Module):
    """It only runs inside `Preparing`."""

    prepared = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.prepared:
            raise RuntimeError("not prepared")
        return x * 2


class Preparing(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        self[1].prepared = True
        try:
            return super().forward(x)  # type: ignore[no-any-return]
        finally:
            del self[1].prepared


def test_all_parts_or_none() -> None:
    """A part that cannot be optimized is an error, and leaves the others as they were."""
    model = Preparing(Dropping(), Refusing())
    with pytest.raises(CaptureError):
        fusewright.optimize_parts(model, torch.randn(4, 8), parts=(Dropping, Refusing))
    assert type(model[0]) is Dropping
