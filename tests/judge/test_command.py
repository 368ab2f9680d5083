"""The command and the function: exit codes, the record, refusals, a file of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.errors import ConfinementError, DeviceError, ProblemError
from fusewright.judge import processes
from fusewright.judge.judge import judge
from fusewright.judge.process import Limits
from fusewright.judge_command import judge as command
from fusewright.problem.load import load_problem

FOLDER = Path(__file__).parent / "candidates"
SMALL = FOLDER / "small.py"
# As the machine may have no namespaces; test_candidates.py uses them.
UNCONFINED = ("--device", "cpu", "--unconfined", "--no-time")


def test_verdicts_of_several_files_and_their_record(tmp_path: Path) -> None:
    record = tmp_path / "out" / "record.json"
    files = [str(FOLDER / "zeros.py"), str(FOLDER / "exit_zero.py")]
    done = CliRunner().invoke(command, [str(SMALL), *files, *UNCONFINED, "--json", str(record)])
    assert done.exit_code == 1, done.output
    zeros, left = json.loads(record.read_text())
    assert (zeros["verdict"], zeros["exit_code"]) == ("wrong", 1)
    assert zeros["reason"].startswith("output: all zero") and zeros["seen"] == "0"
    assert (left["verdict"], left["exit_code"]) == ("dishonest", 3)
    assert "all checks passed" in left["output"] and not left["confined"]
    assert f"{files[0]}: wrong: output: all zero" in done.output


def test_a_single_files_verdict_is_the_exit_code() -> None:
    file = str(FOLDER / "exit_at_load.py")
    done = CliRunner().invoke(command, [str(SMALL), file, *UNCONFINED])
    assert done.exit_code == 3 and "exit code 0 before it had answered" in done.output


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="no such file"):
        judge(SMALL, tmp_path / "missing.py", confined=False)
    done = CliRunner().invoke(command, [str(SMALL), str(tmp_path), *UNCONFINED])
    assert isinstance(done.exception, ProblemError) and "no Python file" in str(done.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    done = CliRunner().invoke(
        command, [str(SMALL), str(SMALL), "--device", "cuda", *UNCONFINED[2:]]
    )
    assert isinstance(done.exception, DeviceError)


def test_a_machine_without_namespaces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "missing_confinement", lambda: "unshare: not permitted")
    with pytest.raises(ConfinementError, match=r"unshare: not permitted.*--unconfined"):
        judge(SMALL, FOLDER / "rewritten.py")


def test_a_file_without_a_model_is_told_its_line(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("import torch\n")
    verdict = judge(SMALL, path, confined=False)
    assert verdict.word == "crashed" and "there is no class ModelNew" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hangs", "leaves_processes", "packed_by_version"])
def test_the_same_verdicts_without_a_box(name: str) -> None:
    path = FOLDER / f"{name}.py"
    words = path.read_text().split("# verdict: ")[1].split("\n")[0].replace("-", " ")
    limits = Limits(5.0 if name == "hangs" else 120.0)  # other work may take the cores
    verdict = judge(SMALL, path, confined=False, limits=limits)
    assert verdict.word == words, verdict.lines()


@pytest.mark.slow
def test_strict_makes_a_flag_a_failure() -> None:
    verdict = judge(SMALL, FOLDER / "fixed_size.py", confined=False, strict=True)
    assert verdict.word == "wrong" and verdict.reason.startswith("a flag counts as a failure")
    assert verdict.flags[0].startswith("refuses calls with")


@pytest.mark.sample(2)
@pytest.mark.parametrize("problem", [SMALL, FOLDER / "norm.py"], ids=lambda path: path.stem)
def test_our_own_files_are_accepted(problem: Path, tmp_path: Path) -> None:
    loaded = load_problem(problem)
    bundle = solve(loaded.make_model(), loaded.make_inputs()).bundle
    path = tmp_path / "emitted.py"
    path.write_text(file_text(bundle, loaded.source, ""))
    verdict = judge(problem, path, confined=False)
    assert verdict.word == "accepted", verdict.lines()
    assert verdict.flags == ()
