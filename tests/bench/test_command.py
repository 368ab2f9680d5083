"""`fusewright bench` and `compare` as commands: exit codes, one-line errors, folders, resuming."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fusewright import cli
from fusewright.bench import command, environment, folder, storage
from fusewright.bench.environment import look_around, source_sha256
from fusewright.bench.folder import Job, Limits, finished, jobs_of, run_job, run_jobs
from fusewright.bench.record import Environment, Record, Settings
from fusewright.bench.run import problem_facts
from fusewright.bench.summary import collect
from fusewright.bench.table import print_collection, print_record
from fusewright.page.document import render
from tests.support.bench_records import LINEAR_PROBLEM, NEW_CLASS, made_up_record

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


OTHER = LINEAR_PROBLEM.replace("2 * width", "3 * width") + NEW_CLASS + "    pass\n"
RAISES = "    def __init__(self, width):\n        raise ValueError('first\\nsecond')\n"


def small(tmp_path: Path, name: str = "small.py", text: str = LINEAR_PROBLEM) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_one_problem_and_a_foreign_file(tmp_path: Path, run: Run) -> None:
    problem = small(tmp_path)
    same = small(tmp_path, "same.py", LINEAR_PROBLEM + NEW_CLASS + "    pass\n")
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
    wrong = small(tmp_path, "wrong.py", LINEAR_PROBLEM + NEW_CLASS + body)
    code, words, _ = run("bench", small(tmp_path), wrong, "--pass", "forward", *QUICK)
    assert code == 1 and "WRONG" in words


def test_files_that_cannot_be_asked_are_results(tmp_path: Path, run: Run) -> None:
    files = [
        small(tmp_path, "other.py", OTHER),
        small(tmp_path, "two_lines.py", LINEAR_PROBLEM + NEW_CLASS + RAISES),
        small(tmp_path, "none.py"),
    ]
    place = tmp_path / "x.json"
    given = ("bench", small(tmp_path), *files, "--json", place, "--pass", "forward")
    code, _, _ = run(*given, *QUICK)
    assert code == 1
    (found,) = storage.read_records(place)
    eager, other, lines, none = found.passes[0].results
    assert eager.status == "skipped" and "no file was right" in eager.note
    assert other.status == "wrong" and "both must be the same" in other.note
    assert lines.status == "failed" and "ValueError: first second" in lines.note
    assert none.status == "failed" and "there is no class ModelNew" in none.note


def test_ours_beside_a_foreign_file_with_the_name_of_a_baseline(tmp_path: Path, run: Run) -> None:
    (tmp_path / "theirs").mkdir()
    same = small(tmp_path / "theirs", "eager.py", LINEAR_PROBLEM + NEW_CLASS + "    pass\n")
    place = tmp_path / "x.json"
    given = ("bench", small(tmp_path), same, "--ours", "--json", place, "--pass", "forward")
    code, _, _ = run(*given, *QUICK)
    assert code == 0
    (found,) = storage.read_records(place)
    assert [(each.name, each.kind) for each in found.candidates] == [
        ("eager", "eager"),
        ("ours", "ours"),
        ("theirs/eager", "foreign"),
    ]
    assert [each.status for each in found.passes[0].results] == ["timed"] * 3


def test_a_record_is_drawn_again(tmp_path: Path, run: Run) -> None:
    old = made_up_record("p", {"eager": 200.0, "ours": 100.0})
    storage.write(tmp_path / "one.json", old)
    page, charts = tmp_path / "new" / "page.html", tmp_path / "charts"
    code, words, _ = run("bench", tmp_path / "one.json", "--html", page, "--png", charts)
    assert code == 0 and "2.00×" in words
    assert page.read_text() == render([old])
    assert "p-speedup-forward.png" in [each.name for each in charts.iterdir()]
    storage.write(tmp_path / "both.json", collect([old, replace(old, status="crashed")]))
    code, words, _ = run("bench", tmp_path / "both.json")
    assert code == 0 and "2 of 2" in words and "crashed" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.py", *QUICK), "there is no such file"),
        (("broken.py", *QUICK), "failed while it was loaded: ZeroDivisionError"),
        (("small.py", "missing.py", *QUICK), "there is no such file"),
        (("small.py", "--json", "small.py/x.json", *QUICK), "Not a directory"),
        (("small.py", "--json", "closed", *QUICK), "is a folder"),
        (("small.py", "--html", "small.py/x.html", *QUICK), "Not a directory"),
        (("small.py", "--png", "small.py", *QUICK), "Not a directory"),
        (("small.py", "--png", "/proc/charts", *QUICK), "nothing can be written here"),
        (("small.py", "same.py", "same.py", *QUICK), "is given twice"),
        (("silent.py", *QUICK), "fails in train: RuntimeError: tensor("),
        (("hungry.py", *QUICK), "DefaultCPUAllocator"),
        (("small.py", "--budget", "0", "--device", "cpu"), "--budget is 0"),
        (("small.py", "--budget", "nan", "--device", "cpu"), "--budget is nan"),
        ((".", "--json", "x", "--time-limit", "-1", *QUICK), "--time-limit is -1"),
        (("record.json", "--json", "x.json"), "this is a record, which can only be drawn"),
        (("small.py", "--baselines", "fastest"), "there is no baseline 'fastest'"),
        ((".", *QUICK), "needs --json"),
        ((".", "other.py", "--json", "x", *QUICK), "ModelNew files go with one problem"),
        (("empty", "--json", "x", *QUICK), "no file in this folder defines get_inputs()"),
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
    small(tmp_path, "other.py")
    small(tmp_path, "same.py", LINEAR_PROBLEM + NEW_CLASS + "    pass\n")
    small(tmp_path, "silent.py", LINEAR_PROBLEM.replace("return torch.relu", "raise RuntimeError"))
    small(tmp_path, "hungry.py", LINEAR_PROBLEM.replace("randn(64, 96)", "randn(10**7, 10**7)"))
    small(tmp_path, "record.json", "{}")
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
    storage.write(old, made_up_record("p", {"eager": 200.0, "ours": 100.0}))
    storage.write(new, made_up_record("p", {"eager": 200.0, "ours": 120.0}))
    bad.write_text("[]")
    code, words, _ = run("compare", old, new)
    assert code == 1 and "slower" in words and "1.200" in words
    assert "Warning" not in words
    storage.write(new, made_up_record("p", {"eager": 240.0, "ours": 120.0}))
    code, words, _ = run("compare", old, new)
    assert code == 1 and "Warning: 1 times of baselines changed, too" in words
    assert run("compare", new, old)[0] == 0
    for pair in ((old, bad), (old, tmp_path / "none.json")):
        code, _, errors = run("compare", *pair)
        assert code == 2 and len(errors.strip().splitlines()) == 1


SETTINGS = replace(Settings("cpu", baselines=("eager",), quick=True), passes=("forward",))
ARGUMENTS = ("--pass", "forward", *QUICK)
HERE = look_around(torch.device("cpu"), "a command")


@pytest.mark.by_the_clock
def test_crashes_hangs_and_broken_files_are_reported(tmp_path: Path) -> None:
    texts = {
        "killed": (
            LINEAR_PROBLEM + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
            60,
        ),
        "hangs": (LINEAR_PROBLEM + "\nimport time\ntime.sleep(600)\n", 4),
        "broken": (LINEAR_PROBLEM + "\n1 / 0\n", 60),
        "hungry": (LINEAR_PROBLEM.replace("randn(64, 96)", "randn(10**7, 10**7)"), 60),
    }
    found: dict[str, Record] = {}
    for name, (text, seconds) in texts.items():
        job = Job(small(tmp_path, f"{name}.py", text), tmp_path / "out" / f"{name}.json")
        found[name] = run_job(job, SETTINGS, ARGUMENTS, Limits(seconds), HERE)
        assert storage.read(job.record) == found[name]
    assert found["killed"].status == "crashed" and "SIGKILL" in found["killed"].error
    assert found["hangs"].status == "timeout" and "time limit of 4 s" in found["hangs"].error
    assert found["broken"].status == found["hungry"].status == "failed"
    broken = tmp_path / "broken.py"
    assert (
        found["broken"].error.startswith(f"{broken}:") and "ZeroDivision" in found["broken"].error
    )
    assert "DefaultCPUAllocator" in found["hungry"].error


def test_what_is_finished_is_kept_and_the_rest_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "c_new"):
        small(tmp_path, f"{name}.py")
    small(tmp_path, "tools.py", "x = 1\n")
    jobs = jobs_of(tmp_path, tmp_path / "out")
    assert [job.problem.stem for job in jobs] == ["a", "b", "c"]
    ran: list[str] = []

    def fake(
        job: Job, settings: Settings, arguments: object, limits: Limits, here: Environment
    ) -> Record:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(job.problem.stem)
        made = Record(problem_facts(job.problem), settings, environment=here)
        made = replace(made, status="crashed") if job.problem.stem == "b" else made
        storage.write(job.record, made)
        return made

    monkeypatch.setattr(folder, "run_job", fake)
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(jobs, SETTINGS, (), Limits(9), HERE))
    assert ran == ["a", "b"]
    ran.clear()
    assert len(list(run_jobs(jobs, SETTINGS, (), Limits(9), HERE))) == 3
    assert ran == ["c"]
    ran.clear()
    list(run_jobs(jobs, SETTINGS, (), Limits(9, retry_failed=True), HERE))
    assert ran == ["b"]
    ran.clear()
    (tmp_path / "a.py").write_text(LINEAR_PROBLEM + "\n# changed\n")
    list(run_jobs(jobs, SETTINGS, (), Limits(9), HERE))
    assert ran == ["a"]
    ran.clear()
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(jobs, replace(SETTINGS, seed=1), (), Limits(9), HERE))
    assert ran == ["a", "b"]


def test_what_other_code_or_another_machine_measured_is_not_kept(tmp_path: Path) -> None:
    job = Job(small(tmp_path), tmp_path / "small.json")
    storage.write(job.record, Record(problem_facts(job.problem), SETTINGS, environment=HERE))
    assert finished(job, SETTINGS, Limits(9), replace(HERE, command="other", commit="other"))
    versions = {**HERE.versions, "torch": "1.0"}
    for other in (
        replace(HERE, source_sha256="00"),
        replace(HERE, device="NVIDIA H100"),
        replace(HERE, versions=versions),
    ):
        assert finished(job, SETTINGS, Limits(9), other) is None


def test_the_code_is_known_by_all_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bench/environment.py", "kernels/loop.hpp", "page/tables.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "bench/environment.py"))
    before = source_sha256()
    (tmp_path / "page/tables.py").write_text("two")
    assert source_sha256() == before
    (tmp_path / "kernels/loop.hpp").write_text("two")
    assert source_sha256() != before


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
    assert code == 0 and "Speedups over all problems" in words
    (one,) = storage.read_records(place)
    assert storage.read(tmp_path / "out" / "latest" / "small.json") == one
    assert one.status == "ok" and one.subjects == ("ours",)
    stamp = (tmp_path / "out" / "latest" / "small.json").stat().st_mtime_ns
    code, words, _ = run(*arguments)
    assert code == 0 and "Kept from an earlier run" in words
    assert (tmp_path / "out" / "latest" / "small.json").stat().st_mtime_ns == stamp
    assert storage.read_records(place.with_suffix("")) == (one,)


def test_the_bar_says_what_runs_and_how_long_it_may_take() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)
    with cli._bench_steps(console, ("load", "time"), False) as tick:
        tick("load", 0.0)
        tick("time", 0.0)
        time.sleep(0.3)
        tick("warm up [ours]", 0.5)
    text = drawn.getvalue()
    assert "load" in text and "warm up [ours]" in text
    assert re.search(r"left.*-:--:--", text), "nothing is known of the time left at first"
    assert re.search(r"left.*0:00:0\d", text)


def test_the_tables_fit_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    print_record(console, made_up_record("p", {"eager": 200.0, "compile": 150.0, "ours": 100.0}))
    text = console.export_text()
    assert "2.00×" in text and "100 µs" in text and "…" not in text


def test_a_coarser_time_never_stands_unmarked(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    fine = made_up_record("p", {"eager": 200.0, "compile": 150.0, "ours": 100.0})
    first, *others = fine.passes[0].results
    mixed = (first, *(replace(each, precision="tf32") for each in others))
    coarse = replace(fine, passes=(replace(fine.passes[0], results=mixed),))
    print_collection(console, collect([fine, coarse]))
    text = console.export_text()
    assert "forward, ours: 2.00× eager" in text
    assert "forward, ours, tf32: 2.00× eager (fp32)" in text


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
