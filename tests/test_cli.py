"""The commands as a user runs them: exit codes, messages, the JSON record, the emitted file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusewright import cli
from fusewright.runtime import library
from tests.support.command_line import fusewright

PROBLEM = '''
import torch
from torch import nn


class Model(nn.Module):
    """Odd on purpose: a scalar parameter, a buffer that changes, two outputs."""

    def __init__(self, features, scale):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.limit = nn.Parameter(torch.tensor(0.5))
        self.scale = scale

    def forward(self, x):
        y = torch.min(self.norm(x), self.limit) * self.scale
        return y, y.sum(1)


def get_inputs():
    return [torch.randn(6, 5)]


def get_init_inputs():
    return [5, 1.5]
'''
STEP_KEYS = {"kind", "name", "operators", "bytes", "operations"}
CHECK_KEYS = {"name", "error", "eager_error", "allowed", "ok"}


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The same in the folder, in this process, which has imported PyTorch."""

    def call(*args: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["fusewright", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, code, said.out, said.err)

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one problem has been optimized."""
    place = tmp_path_factory.mktemp("cli")
    (place / "problem.py").write_text(PROBLEM)
    done = fusewright("optimize", "problem.py", "--json", "out/record.json", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "stdout.txt").write_text(done.stdout)
    return place


def test_optimize_writes_the_file_and_the_record(folder: Path) -> None:
    record = json.loads((folder / "out/record.json").read_text())
    wanted = "problem device versions mode steps checks notes timings_ms build_seconds output"
    assert set(wanted.split()) <= set(record)
    assert record["problem"] == "problem" and record["mode"] == "both"
    assert all(set(step) >= STEP_KEYS for step in record["steps"])
    assert all(set(check) >= CHECK_KEYS and check["ok"] for check in record["checks"])
    names = {check["name"] for check in record["checks"]}
    assert {"train: grad limit", "train: buffer norm.running_mean", "eval: output[1]"} <= names
    assert set(record["timings_ms"]) == {
        f"{who} {what}" for who in ("eager", "ours") for what in ("forward", "forward+backward")
    }
    assert "class ModelNew(Model)" in (folder / "problem_new.py").read_text()
    assert sorted(path.name for path in folder.glob("*.py")) == ["problem.py", "problem_new.py"]


def test_optimize_compiles_each_part_of_the_file_once(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever runs the file afterwards does not compile at all."""
    compiler = tmp_path / "compiler"
    counted = 'for word; do [ "$word" = -c ] && echo run >> "$RUNS"; done'
    compiler.write_text(f'#!/bin/sh\n{counted}\nexec {os.environ.get("CXX", "g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    cut = library._FW_CUT
    options = ("--check-seconds", "0", "--mode", "eval", "--json", "once.json")
    for words, seconds in (("built in", 0.1), ("came from the cache", 0.0)):
        done = run("optimize", "problem.py", "-o", "once.py", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"its kernels {words}" in done.stdout
        assert json.loads((folder / "once.json").read_text())["build_seconds"] >= seconds
    parts = max(1, (folder / "once.py").read_text().count(cut))
    assert (tmp_path / "runs").read_text().split() == ["run"] * min(parts, library._fw_cores())
    verified = run("verify", "problem.py", "once.py", "--mode", "eval", "--check-seconds", "0")
    assert verified.returncode == 0 and len((tmp_path / "runs").read_text().split()) <= parts
    (folder / "once.py").unlink()


def test_a_compiler_that_fails_is_named_and_no_file_is_written(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    told = {
        str(compiler): ["the host compiler failed", f"{compiler} -std=c++17", "out of order"],
        "no-such-compiler": ["'no-such-compiler' was not found", "set CXX"],
    }
    for name, words in told.items():
        monkeypatch.setenv("CXX", name)
        done = run("optimize", "problem.py", "-o", "broken_new.py", "--mode", "eval")
        assert done.returncode == 2 and all(each in done.stderr for each in words), done.stderr
        assert "Traceback" not in done.stderr and not list(folder.glob("*broken_new*"))
        assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "cache").chmod(0o777)
    done = run("optimize", "problem.py", "-o", "broken_new.py", "--mode", "eval")
    assert done.returncode == 2 and "chmod 700" in done.stderr


def test_optimize_shows_steps_as_plain_lines_off_a_terminal(folder: Path) -> None:
    shown = (folder / "stdout.txt").read_text()
    for line in ("capture and compile …", "check against float64 …", "fused:", "ratio"):
        assert line in shown
    assert "\x1b" not in shown


def test_verify_repeats_the_checks_of_optimize(folder: Path, run: Run) -> None:
    done = run("verify", "problem.py", "problem_new.py", "--json", "v.json")
    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads((folder / "out/record.json").read_text())["checks"]
    again = json.loads((folder / "v.json").read_text())
    assert again["ok"] and [c["name"] for c in again["checks"]] == [c["name"] for c in first]


def test_what_was_not_checked_is_said_everywhere(folder: Path, run: Run) -> None:
    options = ("--check-seconds", "0", "--mode", "eval", "--json", "hasty.json")
    done = run("optimize", "problem.py", "-o", "hasty.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    over = "not checked: the 0 s for checks were over"
    record = json.loads((folder / "hasty.json").read_text())
    (note,) = [each for each in record["notes"] if "other processes" not in each]
    assert note.startswith("eval, no_grad, NaN; eval, new parameters;") and note.endswith(over)
    assert f"• {note}" in done.stdout
    header = (folder / "hasty.py").read_text().split("import", 1)[0]
    (folder / "hasty.py").unlink()
    assert over in " ".join(header.split())
    names = {check["name"] for check in record["checks"]}
    assert {"eval: output[0]", "eval: grad limit", "eval, no_grad: output[1]"} <= names
    again = run("verify", "problem.py", "problem_new.py", "--check-seconds", "0")
    assert again.returncode == 0 and over in again.stdout


def test_the_support_code_may_be_a_second_file(folder: Path, run: Run) -> None:
    options = ("--split", "--check-seconds", "0", "--mode", "eval")
    done = run("optimize", "problem.py", "-o", "split.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    text, support = ((folder / name).read_text() for name in ("split.py", "split_support.py"))
    assert "class ModelNew(Model)" in text and "class ModelNew" not in support
    assert "split_support.py" in text and len(support) > len(text)
    again = run("verify", "problem.py", "split.py", "--mode", "eval", "--check-seconds", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    (folder / "kept_support.py").symlink_to("problem.py")
    kept = run("optimize", "problem.py", "-o", "kept.py", *options)
    assert kept.returncode == 2 and "this is the problem itself" in kept.stderr
    for name in ("split.py", "split_support.py", "kept_support.py"):
        (folder / name).unlink()


def test_verify_refuses_a_wrong_file(folder: Path, run: Run) -> None:
    wrong = (folder / "problem_new.py").read_text() + (
        "\n\nclass ModelNew(Model):\n"
        "    def forward(self, x):\n"
        "        y, total = super().forward(x)\n"
        "        return y * 1.001, total\n"
    )
    (folder / "wrong.py").write_text(wrong)
    done = run("verify", "problem.py", "wrong.py")
    (folder / "wrong.py").unlink()
    assert done.returncode == 1 and "WRONG" in done.stdout and "a check failed" in done.stderr


def test_explain_says_what_is_fused(folder: Path, run: Run) -> None:
    done = run("explain", "problem.py", "--mode", "eval")
    assert done.returncode == 0 and "fused: " in done.stdout and "eval mode" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("optimize", "absent.py"), "there is no such file"),
        (("verify", "problem.py", "absent.py"), "there is no such file"),
        (("explain", "broken.py"), "broken.py:2"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    folder: Path, run: Run, arguments: tuple[str, ...], words: str
) -> None:
    (folder / "broken.py").write_text("import torch\ndef get_inputs(:\n")
    done = run(*arguments)
    if arguments[0] == "explain":  # and as users see it
        alone = fusewright(*arguments, cwd=folder)
        assert (alone.returncode, alone.stderr) == (done.returncode, done.stderr)
    (folder / "broken.py").unlink()
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_the_problem_itself_is_never_written_over(folder: Path, run: Run) -> None:
    before = (folder / "problem.py").read_text()
    (folder / "link.py").symlink_to("problem.py")
    for option, name in (("-o", "problem.py"), ("-o", "link.py"), ("--json", "./problem.py")):
        done = run("optimize", "problem.py", option, name)
        assert done.returncode == 2 and "this is the problem itself" in done.stderr
        assert (folder / "problem.py").read_text() == before
    (folder / "link.py").unlink()


def test_what_fails_in_the_emitted_file_is_reported_under_its_name(folder: Path, run: Run) -> None:
    source = PROBLEM + "\nassert '__doc__' not in globals() or 'fused by' not in (__doc__ or '')\n"
    (folder / "shy.py").write_text(source)
    done = run("optimize", "shy.py", "-o", "shy_out.py")
    (folder / "shy.py").unlink()
    assert done.returncode == 2 and "AssertionError" in done.stderr
    assert f"{folder / 'shy_out.py'}:" in done.stderr and "draft" not in done.stderr
    assert not (folder / "shy_out.py").exists()


@pytest.mark.parametrize("free_gb", [None, 1])
def test_memory_that_runs_out_is_one_line(
    free_gb: int | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")

    monkeypatch.setattr("fusewright.problem.load.load_problem", full)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: free_gb is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 140 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 39 * 10**9)
    done = run("explain", "problem.py", "--device", "cpu")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fusewright: memory ran out") and "make the inputs smaller" in line
    held = "of the GPU's 140.0 GB this process holds 39.0 GB and other programs hold 100.0 GB"
    assert (held in line) == (free_gb is not None)
