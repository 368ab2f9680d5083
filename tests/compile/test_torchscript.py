"""TorchScript modules keep their state out of sight of our guards: they run as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile.solution import solve
from fusewright.errors import LeftToEagerError, ProblemError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
X = torch.linspace(-1.0, 2.0, 12).view(3, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) * (2.0 if self.training else 1.0)


class Around(nn.Module):
    def __init__(self, make: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.inner = make(Scaled())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.first(x)) + 1
        return result


def traced(module: nn.Module) -> nn.Module:
    found: nn.Module = torch.jit.trace(module, X)  # type: ignore[no-untyped-call]
    return found


MAKERS: dict[str, Callable[[nn.Module], nn.Module]] = {"script": torch.jit.script, "trace": traced}


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_with_a_torchscript_module_runs_as_it_is(name: str) -> None:
    model = Around(MAKERS[name])
    with pytest.warns(RuntimeWarning, match="inner is a TorchScript module"):
        fast = fusewright.optimize(model, X)
    for training in (True, False):
        model.train(training)
        assert torch.equal(fast.train(training)(X[:2]), model(X[:2]))
        with torch.no_grad():
            model.inner.scale.mul_(1.5)
    with pytest.raises(LeftToEagerError, match="use the Python module, or optimize other parts"):
        solve(model, (X,))


@pytest.mark.parametrize("name", MAKERS)
def test_the_parts_around_one_are_optimized(name: str) -> None:
    model = Around(MAKERS[name])
    expected = copy.deepcopy(model)(X[:2])
    fusewright.optimize_parts(model, X, parts="first")
    torch.testing.assert_close(model(X[:2]), expected)
    assert fusewright.explain(model.first).graphs


@pytest.mark.parametrize("name", MAKERS)
def test_a_torchscript_module_itself_is_refused(name: str) -> None:
    model = Around(MAKERS[name])
    with pytest.raises(ProblemError, match="Scaled is a TorchScript module; optimize the module"):
        fusewright.optimize(model.inner, X)
    with pytest.raises(ProblemError, match="Scaled is a TorchScript module"):
        fusewright.optimize_parts(model, X, parts="inner")


def test_a_part_that_becomes_torchscript_later() -> None:
    fast = fusewright.optimize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    fast[1] = torch.jit.script(nn.Tanh())
    with pytest.warns(RuntimeWarning, match="1 is a TorchScript module"):
        found = fast(X)
    assert torch.equal(found, torch.tanh(fast[0](X)))
