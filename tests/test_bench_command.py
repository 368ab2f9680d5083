"""`fusewright bench` and `compare` as commands: exit codes, one-line errors, folders, resuming."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fusewright import cli
from fusewright.bench import command, folder, storage
from fusewright.bench.folder import Job, Limits, jobs_of, run_job, run_jobs
from fusewright.bench.record import Record, Settings
from fusewright.bench.run import problem_facts
from fusewright.bench.table import print_record
from tests.test_bench_run import NEW, PROBLEM
from tests.test_bench_stats import record

Run = Callable[..., tuple[int, str, str]]
QUICK = ("--quick", "--device", "cpu", "--baselines", "eager", "--budget", "0.3")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: exit code, output, errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fusewright", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


def small(tmp_path: Path, name: str = "small.py", text: str = PROBLEM) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_one_problem_and_a_foreign_file(tmp_path: Path, run: Run) -> None:
    problem = small(tmp_path)
    same = small(tmp_path, "same.py", PROBLEM + NEW + "    pass\n")
    place = tmp_path / "out" / "small.json"
    code, words, _ = run("bench", problem, same, "--json", place, "--pass", "forward", *QUICK)
    assert code == 0
    assert "same" in words and "eager" in words and "floor" in words
    (found,) = storage.read_records(place)
    assert [each.candidate for each in found.passes[0].results] == ["eager", "same"]
    assert found.environment is not None
    assert found.environment.command.startswith("python -m fusewright bench ")
    code, words, _ = run("compare", place, place)
    assert code == 0 and "0 faster, 0 slower or lost, 2 compared" in words


def test_a_wrong_file_is_exit_code_one(tmp_path: Path, run: Run) -> None:
    body = "    def forward(self, x):\n        return super().forward(x) + 1\n"
    wrong = small(tmp_path, "wrong.py", PROBLEM + NEW + body)
    code, words, _ = run("bench", small(tmp_path), wrong, "--pass", "forward", *QUICK)
    assert code == 1 and "WRONG" in words


OTHER = PROBLEM.replace("2 * width", "3 * width") + NEW + "    pass\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.py", *QUICK), "there is no such file"),
        (("broken.py", *QUICK), "failed while it was loaded: ZeroDivisionError"),
        (("small.py", "other.py", *QUICK), "both must have the same parameters"),
        (("small.py", "missing.py", *QUICK), "there is no such file"),
        (("small.py", "--json", "small.py/x.json", *QUICK), "Not a directory"),
        (("small.py", "--json", "closed", *QUICK), "is a folder"),
        (("small.py", "--baselines", "fastest"), "there is no baseline 'fastest'"),
        ((".", *QUICK), "needs --json"),
        ((".", "other.py", "--json", "x", *QUICK), "ModelNew files go with one problem"),
        (("empty", "--json", "x", *QUICK), "no file with a get_inputs()"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    small(tmp_path)
    small(tmp_path, "broken.py", "1 / 0\n")
    small(tmp_path, "other.py", OTHER)
    (tmp_path / "closed").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, _, errors = run("bench", *arguments)
    assert code == 2 and words in errors
    assert len(errors.strip().splitlines()) == 1
    assert [each for each in sorted(tmp_path.rglob("*")) if each.is_file()] == [
        each for each in before if each.is_file()
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_said(tmp_path: Path, run: Run) -> None:
    code, _, errors = run("bench", small(tmp_path), "--device", "cuda")
    assert code == 2 and "PyTorch sees no CUDA device here" in errors


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_said(tmp_path: Path, run: Run) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    code, _, errors = run("bench", small(tmp_path), "--json", closed / "x.json", *QUICK)
    assert code == 2 and "Permission denied" in errors


def test_compare_exits_with_one_when_slower_and_two_without_sense(tmp_path: Path, run: Run) -> None:
    old, new, bad = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "bad.json"
    storage.write(old, record("p", {"eager": 200.0, "ours": 100.0}))
    storage.write(new, record("p", {"eager": 200.0, "ours": 120.0}))
    bad.write_text("[]")
    code, words, _ = run("compare", old, new)
    assert code == 1 and "slower" in words and "1.200" in words
    assert run("compare", new, old)[0] == 0
    for pair in ((old, bad), (old, tmp_path / "none.json")):
        code, _, errors = run("compare", *pair)
        assert code == 2 and len(errors.strip().splitlines()) == 1


SETTINGS = replace(Settings("cpu", baselines=("eager",), quick=True), passes=("forward",))
ARGUMENTS = ("--pass", "forward", *QUICK)


def test_crashes_hangs_and_broken_files_are_reported(tmp_path: Path) -> None:
    texts = {
        "killed": (PROBLEM + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", 60),
        "hangs": (PROBLEM + "\nimport time\ntime.sleep(600)\n", 4),
        "broken": (PROBLEM + "\n1 / 0\n", 60),
    }
    found: dict[str, Record] = {}
    for name, (text, seconds) in texts.items():
        job = Job(small(tmp_path, f"{name}.py", text), tmp_path / "out" / f"{name}.json")
        found[name] = run_job(job, SETTINGS, ARGUMENTS, Limits(seconds))
        assert storage.read(job.record) == found[name]
    assert found["killed"].status == "crashed" and "SIGKILL" in found["killed"].error
    assert found["hangs"].status == "timeout" and "time limit of 4 s" in found["hangs"].error
    assert found["broken"].status == "failed" and "ZeroDivisionError" in found["broken"].error


def test_what_is_finished_is_kept_and_the_rest_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "c_new"):
        small(tmp_path, f"{name}.py")
    small(tmp_path, "tools.py", "x = 1\n")
    jobs = jobs_of(tmp_path, tmp_path / "out")
    assert [job.problem.stem for job in jobs] == ["a", "b", "c"]
    ran: list[str] = []

    def fake(job: Job, settings: Settings, arguments: object, limits: Limits) -> Record:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(job.problem.stem)
        made = Record(problem_facts(job.problem), settings)
        made = replace(made, status="crashed") if job.problem.stem == "b" else made
        storage.write(job.record, made)
        return made

    monkeypatch.setattr(folder, "run_job", fake)
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(jobs, SETTINGS, (), Limits(9)))
    assert ran == ["a", "b"]
    ran.clear()
    assert len(list(run_jobs(jobs, SETTINGS, (), Limits(9)))) == 3
    assert ran == ["c"]
    ran.clear()
    list(run_jobs(jobs, SETTINGS, (), Limits(9, retry_failed=True)))
    assert ran == ["b"]
    ran.clear()
    (tmp_path / "a.py").write_text(PROBLEM + "\n# changed\n")
    list(run_jobs(jobs, SETTINGS, (), Limits(9)))
    assert ran == ["a"]
    ran.clear()
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(jobs, replace(SETTINGS, seed=1), (), Limits(9)))
    assert ran == ["a", "b"]


def test_a_stopped_folder_says_how_to_go_on(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path)

    def stopped(*arguments: object) -> Record:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "run_job", stopped)
    code, words, _ = run("bench", tmp_path, "--json", tmp_path / "all.json", *QUICK)
    assert code == 130 and "0 of 1 problems" in words
    assert not (tmp_path / "all.json").exists()


def test_a_folder_gives_one_file_and_one_record_each(tmp_path: Path, run: Run) -> None:
    small(tmp_path)
    place = tmp_path / "out" / "latest.json"
    arguments = ("bench", tmp_path, "--json", place, *ARGUMENTS)
    code, words, _ = run(*arguments)
    assert code == 0 and "Speed-ups over all problems" in words
    (one,) = storage.read_records(place)
    assert storage.read(tmp_path / "out" / "latest" / "small.json") == one
    assert one.status == "ok" and one.subjects == ("ours",)
    stamp = (tmp_path / "out" / "latest" / "small.json").stat().st_mtime_ns
    assert run(*arguments)[0] == 0
    assert (tmp_path / "out" / "latest" / "small.json").stat().st_mtime_ns == stamp
    assert storage.read_records(place.with_suffix("")) == (one,)


def test_the_tables_fit_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    print_record(console, record("p", {"eager": 200.0, "compile": 150.0, "ours": 100.0}))
    text = console.export_text()
    assert "2.00×" in text and "100 µs" in text and "…" not in text


def test_choices_left_to_us(tmp_path: Path) -> None:
    asked = command.Asked(
        tmp_path, (), None, "cuda", "train", ("forward",), None, False, None, None, False
    )
    assert command.settings_of(asked).baselines == (
        "eager",
        "compile",
        "max-autotune",
        "cudagraphs",
    )
    assert command.settings_of(replace(asked, device="cpu")).baselines == ("eager", "compile")
    quick = command.settings_of(replace(asked, quick=True, baselines="eager, cudagraphs"))
    assert (quick.baselines, quick.budget_s, quick.least_rounds) == (("eager", "cudagraphs"), 2, 7)
