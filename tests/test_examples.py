"""Every example runs, and computes what eager PyTorch computes."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright
from fusewright import cli
from fusewright.problem.load import load_problem

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BLOCKS = sorted(path for path in (EXAMPLES / "blocks").glob("*.py") if "_new" not in path.stem)
PROGRAMS = sorted((EXAMPLES / "programs").glob("*.py"))
RUN = subprocess.run


def name_of(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", [*BLOCKS, *PROGRAMS], ids=name_of)
def test_the_first_line_says_what_it_shows(path: Path) -> None:
    words = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert re.match(r"Shows .+\.$", words.splitlines()[0])


def gradients(model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The output, then the gradient of every floating argument and parameter."""
    given = [each.clone().requires_grad_(each.is_floating_point()) for each in args]
    output = model(*given)
    targets = [each for each in (*given, *model.parameters()) if each.requires_grad]
    seed = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output, *torch.autograd.grad(output, targets, seed)]


@pytest.mark.parametrize("path", BLOCKS, ids=name_of)
def test_a_block_trains_as_eager_does(path: Path) -> None:
    problem = load_problem(path)
    model: torch.nn.Module = problem.make_model().train()
    args: Any = tuple(problem.make_inputs())
    fast = fusewright.optimize(copy.deepcopy(model), args, modes=("train",))
    truth = gradients(copy.deepcopy(model).double(), tuple(each.double() for each in args))
    for ours, eager, true in zip(gradients(fast, args), gradients(model, args), truth, strict=True):
        size, ulp = true.norm(), torch.finfo(torch.float32).eps
        allowed = 4 * (eager - true).norm() + 16 * ulp * size
        assert (ours - true).norm() <= allowed


def in_process(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """`python -m fusewright …` in this process, which has PyTorch open; other commands as ever."""
    if command[:3] != [sys.executable, "-m", "fusewright"]:
        return RUN(command, **how)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fusewright", *command[3:]])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
    assert not (code and how.get("check")), err.getvalue()
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


@pytest.fixture
def said(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What the program prints."""
    monkeypatch.setattr(subprocess, "run", in_process)
    monkeypatch.setattr(cli, "TIMING_BUDGET_S", 0.1)
    runpy.run_path(str(EXAMPLES / "programs" / f"{request.param}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("said", ["live_module"], indirect=True)
def test_a_live_module_is_the_model(said: str) -> None:
    assert said.count("True") == 2
    differences = [float(each) for each in re.findall(r"differs by (\S+)", said)]
    assert len(differences) == 4 and max(differences) < 1e-5


@pytest.mark.parametrize("said", ["training_loop"], indirect=True)
def test_a_training_loop_learns_as_eager_does(said: str) -> None:
    losses = re.findall(r"loss (\S+) eager, (\S+) optimized", said)
    assert len(losses) == 3 and float(losses[-1][1]) < float(losses[0][1]) / 4
    assert all(abs(float(a) - float(b)) < 1e-4 for a, b in losses)


@pytest.mark.parametrize("said", ["emitted_file"], indirect=True)
def test_an_emitted_file_is_imported(said: str) -> None:
    assert float(said.split("largest difference: ")[1]) < 1e-5


@pytest.mark.parametrize("said", ["check_your_own"], indirect=True)
def test_a_wrong_model_is_found(said: str) -> None:
    first, second = said.splitlines()
    assert re.fullmatch(r"exit code 0: \d+ checks, all ok", first)
    assert second.startswith("exit code 1: ") and "a check failed" in second


def test_there_are_programs_for_all_tests() -> None:
    tested = {"live_module", "training_loop", "emitted_file", "check_your_own"}
    assert {path.stem for path in PROGRAMS} == tested
