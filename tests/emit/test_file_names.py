"""Problem files may have any name that a file can have."""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path

import pytest
import torch

from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.problem.load import load_problem
from tests.support.command_line import fusewright

PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x * 2)


def get_inputs():
    return [torch.randn(3, 5)]


def get_init_inputs():
    return []
"""
NAMES = (
    "31_Conv2d_Min_Add_Multiply",
    "9",
    "with spaces and - dashes",
    "two.dots.in it",
    "größe_моделі_模型",
    "n" * 200,
    *keyword.kwlist[:3],
    "_",
    "__init__",
    "a'b\"c",
    "$(touch x);{0}",
    "%s%d",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_any_problem_can_be_loaded(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(PROBLEM)
    problem = load_problem(path)
    model, args = problem.make_model(), problem.make_inputs()
    text = file_text(solve(model, args, name=problem.name).bundle, problem.source, problem.name)
    new = tmp_path / f"{name}_new.py"
    new.write_text(text)
    spec = importlib.util.spec_from_file_location("any_name", new)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    x = torch.randn(4, 5, requires_grad=True)
    fast = torch.compile(made.ModelNew(), backend="aot_eager", fullgraph=True)
    assert torch.equal(fast(x), model(x))
    assert torch.equal(*(torch.autograd.grad(each(x).sum(), x)[0] for each in (fast, model)))


@pytest.mark.as_users_build
def test_the_command_takes_any_name(tmp_path: Path) -> None:
    name = "3 two-part.größe; x"
    (tmp_path / f"{name}.py").write_text(PROBLEM)
    done = fusewright("optimize", f"{name}.py", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}_new.py").exists()
