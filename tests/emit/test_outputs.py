"""Outputs in containers: named tuples and ordered dicts come back as they are."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.errors import ProblemError
from fusewright.problem.load import load_problem


class Pair(NamedTuple):
    mean: Tensor
    rest: Any


class Compass(nn.Module):
    """Names of its classes contain a word that checkers refuse."""

    Compassed = collections.namedtuple("Compassed", ["sum"])

    def forward(self, x: Tensor) -> Any:
        inner = collections.OrderedDict([("z", x * 2), ("a", Pair(x.mean(), None))])
        return Pair(x.mean(0), [self.Compassed(x.sum(1)), inner])


def assert_alike(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(theirs, tuple | list):
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs)
        assert_alike(list(mine.values()), list(theirs.values()))
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
    else:
        assert mine == theirs


def test_containers_come_back_from_the_module() -> None:
    model = Compass()
    program = capture(model, (torch.randn(4, 3),), mode="train")
    assert "pass" not in program.output_tree
    assert {kind for _, kind in program.output_types} == {
        Pair,
        Compass.Compassed,
        collections.OrderedDict,
    }
    fast = fusewright.optimize(model, torch.randn(4, 3), modes=("train",))
    for grad in (True, False):
        x = torch.randn(5, 3, requires_grad=grad)
        assert_alike(fast(x), model(x))
        assert fast(x).mean.shape == (3,)


class Constants(nn.Module):
    """Autograd finds more behind these outputs than the traced graph reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x**0, x**0 * self.weight, x.detach() * 2, self.weight * 3


def gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(y.sum(), leaves, allow_unused=True, retain_graph=True)
    pairs = zip(found, leaves, strict=True)
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in pairs]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_outputs_require_gradients_where_eagers_do(frozen: bool, wanted: bool) -> None:
    model = Constants()
    model.weight.requires_grad_(not frozen)
    fast = fusewright.optimize(model, torch.randn(4, 3))
    for training in (True, False):
        x = torch.randn(5, 3, requires_grad=wanted)
        mine, theirs = fast.train(training)(x), model.train(training)(x)
        assert_alike(mine, theirs)
        leaves = [each for each in (x, model.weight) if each.requires_grad]
        for one, other in zip(mine, theirs, strict=True):
            if other.requires_grad:
                torch.testing.assert_close(gradients(one, leaves), gradients(other, leaves))


PROBLEM = """\
import collections as torch_of_mine
from collections import namedtuple
from typing import NamedTuple

import torch
from torch import nn

collections = 3
Alias = namedtuple("Called", "x y")


class Model(nn.Module):
    class Inner(NamedTuple):
        z: object

    def forward(self, x):
        kept = torch_of_mine.OrderedDict(b=x + 1, a=x.shape[0])
        return Alias(x * 2, self.Inner(kept))


def get_inputs():
    return [torch.randn(4, 3)]


def get_init_inputs():
    return []
"""


def emitted(folder: Path, source: str) -> tuple[Any, Any, str]:
    path = folder / "problem.py"
    path.write_text(source)
    problem = load_problem(path)
    model = problem.make_model()
    solution = solve(model, problem.make_inputs())
    return model, solution, file_text(solution.bundle, problem.source, "")


def test_an_emitted_file_returns_the_same_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    _, _, text = emitted(tmp_path, PROBLEM)
    names: dict[str, Any] = {}
    exec(compile(text, "<emitted>", "exec"), names)
    x = torch.randn(5, 3)
    mine, theirs = names["ModelNew"]()(x), names["Model"]()(x)
    assert type(mine) is names["Alias"] and type(mine.y) is names["Model"].Inner
    assert_alike(mine, theirs)
    assert type(mine.y.z) is collections.OrderedDict and mine.y.z["a"] == 5


def test_a_class_that_cannot_be_imported_is_refused_for_the_file_only(tmp_path: Path) -> None:
    source = PROBLEM.replace('Alias = namedtuple("Called", "x y")', "").replace(
        "        kept", '        Alias = namedtuple("Called", "x y")\n        kept'
    )
    with pytest.raises(ProblemError, match=r"problem\.py: the model returns a Called, .*top level"):
        emitted(tmp_path, source)
    model = load_problem(tmp_path / "problem.py").make_model()
    x = torch.randn(4, 3)
    mine, theirs = fusewright.optimize(model, x, modes=("train",))(x), model(x)
    assert mine._fields == theirs._fields
    torch.testing.assert_close(mine.x, theirs.x)
