"""What forward does besides computing: each call does it, as in eager mode."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright


class Model(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor], path: Path) -> None:
        super().__init__()
        self.read, self.path = read, str(path)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x * self.weight)


def _printed(m: Any, x: Tensor) -> Tensor:
    print("rows", x.shape[0])
    return x.relu()


def _warned(m: Any, x: Tensor) -> Tensor:
    warnings.warn("of the model", stacklevel=1)
    return x.relu()


def _filed(m: Any, x: Tensor) -> Tensor:
    with open(m.path, "a") as file:  # noqa: PTH123  (as users write it)
        file.write("a row\n")
    return x.relu()


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.parametrize("read", [_printed, _warned, _filed])
def test_effects_of_each_call(
    read: Callable[[Any, Tensor], Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, x = tmp_path / "log", torch.randn(3, 4)
    path.write_text("")

    def effects(model: nn.Module) -> tuple[str, list[str], str]:
        path.write_text("")
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for rows in (3, 3, 5):
                found = model(torch.ones(rows, 4))
                torch.testing.assert_close(found, model.weight.expand(rows, 4))
        said = [str(each.message) for each in seen if "of the model" in str(each.message)]
        return capsys.readouterr().out, said, path.read_text()

    model = Model(read, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = fusewright.optimize(model, x)
    wanted = effects(model)
    assert any(wanted) and effects(fast) == wanted


@pytest.mark.parametrize("clock", ["module", "function"])
def test_the_time_of_each_call(clock: str, tmp_path: Path) -> None:
    reads = {
        "module": lambda m, x: x * 0 + time.perf_counter() % 100,
        "function": lambda m, x: x * 0 + perf_counter() % 100,
    }
    fast = fusewright.optimize(Model(reads[clock], tmp_path), torch.randn(3, 4))
    first = fast(torch.ones(3, 4))
    # PyTorch 2.13 cannot trace the remainder of a number that changes; eager mode runs that graph.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "eager mode runs a graph: .*python_mod")
        for _ in range(3):
            time.sleep(0.01)
            again = fast(torch.ones(3, 4))
            assert not torch.equal(again, first)
            first = again


@pytest.mark.filterwarnings("ignore:the original forward runs")
def test_a_gradient_penalty_inside_forward(tmp_path: Path) -> None:
    def penalty(m: Any, x: Tensor) -> Tensor:
        energy = (x * x).tanh().sum()
        (found,) = torch.autograd.grad(energy, m.weight, create_graph=True)
        return energy + found.norm()

    model, x = Model(penalty, tmp_path), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    for each in (fast, model):
        each.zero_grad()
        each(x).backward()
        each.kept = each.weight.grad.clone()
    torch.testing.assert_close(fast.kept, model.kept)


@pytest.mark.filterwarnings("ignore:the original forward runs")
def test_a_seed_in_a_model_that_cannot_be_copied(tmp_path: Path) -> None:
    """There is no real call as a witness."""

    def seeded(m: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.rand(4)

    model, x = Model(seeded, tmp_path), torch.randn(3, 4)
    model.module = ModuleType("of_the_user")
    fast = fusewright.optimize(model, x)
    found, wanted = [], []
    for each, into in ((fast, found), (model, wanted)):
        torch.manual_seed(5)
        into += [each(x), torch.rand(3)]
    torch.testing.assert_close(found, wanted)
