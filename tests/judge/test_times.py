"""The clock belongs to the judge: floors, empty requests, baselines, stopped processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusewright.judge import process, processes
from fusewright.judge.arena import Arena, aligned
from fusewright.judge.floor import LeastBytes, Rates, least_bytes, measure_rates
from fusewright.judge.guarded import room
from fusewright.judge.judge import judge
from fusewright.judge.placement import Placement, piece_of
from fusewright.judge.processes import (
    TOKEN,
    is_running,
    run_ns,
    stop_below,
    was_woken,
    with_token,
)
from fusewright.judge.race import fault_of_time
from fusewright.judge.timekeeper import Timing
from fusewright.judge.times import PassTimes, gain_in_words, speedups_of, times_of
from fusewright.judge.verdict import Verdict

pytestmark = pytest.mark.by_the_clock

FOLDER = Path(__file__).parent / "candidates"
QUICK = Timing(baselines=("eager",), budget_s=0.3)


def pass_times(candidate_us: float, floor_us: float) -> PassTimes:
    mine = [candidate_us * (1 + 0.01 * index) for index in range(9)]
    times = (times_of("candidate", mine), times_of("eager", [3 * each for each in mine]))
    return PassTimes("forward", "train", 9, 1, 100.0, floor_us, times, speedups_of(times))


def test_a_time_below_the_floor_is_dishonest() -> None:
    fault = fault_of_time(pass_times(2.0, floor_us=5.0))
    assert fault is not None and fault.word == "dishonest"
    assert fault.expected == "at least 5.00 µs" and fault.seen == "2.08 µs"
    assert fault_of_time(pass_times(6.0, floor_us=5.0)) is None
    few = replace(pass_times(2.0, floor_us=5.0), rounds=6)
    assert fault_of_time(few) is None, "too few rounds on a busy machine"


def test_speedups_are_told_against_the_best_baseline() -> None:
    found = pass_times(10.0, floor_us=1.0)
    assert found.speedups[0].value == pytest.approx(3.0)
    assert gain_in_words([found]) == "; forward 3.00× as fast as eager"
    assert "candidate 10.4 µs, eager 31.2 µs; 3.00× eager" in found.line()


def test_the_floor_counts_what_must_move() -> None:
    gradient = torch.zeros(4, 8)
    gradient[:2] = 1.0  # half of x is never read
    eager = {"output": torch.ones(4, 8), "grad x": gradient, "grad w": torch.ones(10)}
    outputs = {"tensor": 0, "stride": [8, 1]}
    weights = frozenset({"w"})
    assert least_bytes(eager, outputs, {}, weights) == LeastBytes(16 * 4 + 32 * 4, 40)
    expanded = {"tensor": 0, "stride": [0, 1]}
    assert least_bytes(eager, expanded, {}, weights).of_a_set == 16 * 4
    tangents = {"output": torch.ones(4, 8)}
    assert least_bytes(eager, outputs, tangents, weights).of_a_set == 16 * 4 + 2 * 32 * 4
    assert LeastBytes(100, 60).floor_us(3, Rates(1e6, 1.0)) == pytest.approx(120.0)


def test_rates_are_those_of_a_machine() -> None:
    rates = measure_rates(torch.device("cpu"))
    assert 1e8 < rates.copy_bytes_per_s < 1e13 and 1e8 < rates.operations_per_s < 1e15


@pytest.fixture
def arena() -> Arena:
    made = Arena.new(1 << 20, 1 << 20)
    yield made  # type: ignore[misc]
    made.close()


def test_results_arrive_whole_in_any_order_of_blocks(arena: Arena) -> None:
    values = [torch.randn(100_003), torch.arange(5), torch.zeros(0), torch.randn(1000).half()]
    start, sizes = 0, []
    other = Arena(os.dup(arena.descriptor), arena.inputs_bytes)
    for each in values:
        sizes.append(other.put(each, start))
        start += aligned(sizes[-1])
    found = arena.taken(sizes)
    for each, raw in zip(values, found, strict=True):
        expected = each.numpy().tobytes()
        assert raw == expected
    assert other.put(torch.zeros(1 << 19), 0) == -1, "there is no room for two megabytes"
    other.close()


def test_nobody_can_change_the_size_of_the_memory(arena: Arena) -> None:
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)


def test_inputs_lie_at_old_addresses_or_new_ones(arena: Arena) -> None:
    placement = Placement(arena, random.Random(3))
    pieces = [piece_of(0, (0, name), torch.randn(8, 8)) for name in ("x", "y")]
    placement.assign(pieces, "fresh")
    first = [each.node["offset"] for each in pieces]
    again = [piece_of(0, (0, name), torch.randn(8, 8)) for name in ("x", "y")]
    placement.assign(again, "again")
    assert [each.node["offset"] for each in again] == first
    placement.write()
    assert placement.damaged() == [] and dict(placement.changed(0)) == {}
    memory = arena.bytes_at(first[0], room(again[0].form))
    memory[0] = 0
    memory[4096] ^= 1
    assert placement.damaged() == ["input x"] and list(dict(placement.changed(0))) == ["x"]
    placement.assign([piece_of(0, (0, "x"), torch.randn(3))], "again")  # another form
    assert abs(first[1] - first[0]) >= room(again[0].form)


def test_all_processes_below_stand_still() -> None:
    """A process and its child print numbers until both are stopped."""
    code = "import os, time\nos.fork()\nwhile True:\n    print(1, flush=True); time.sleep(0.001)"
    shell = [
        sys.executable,
        "-c",
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])",
    ]
    running = subprocess.Popen(shell, stdout=subprocess.PIPE)
    assert running.stdout is not None
    os.set_blocking(running.stdout.fileno(), False)
    try:
        deadline = time.monotonic() + 20
        while len(running.stdout.read() or b"") < 20 and time.monotonic() < deadline:
            time.sleep(0.1)
        stopped = stop_below(running.pid)
        assert len(stopped) == 2
        running.stdout.read()
        time.sleep(0.05)
        assert not running.stdout.read(), "a stopped process goes on"
    finally:
        for pid in (*stopped, running.pid):
            os.kill(pid, signal.SIGKILL)
        running.wait()


def test_who_runs_while_it_must_stand_still_is_noticed() -> None:
    """A process counts how long it ran; stopped ones run no more, and woken ones do."""
    running = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        below = stop_below(os.getpid())
        assert running.pid in below and not is_running(running.pid)
        time.sleep(0.05)
        before = run_ns([running.pid])
        time.sleep(0.2)
        assert run_ns([running.pid]) == before
        os.kill(running.pid, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while run_ns([running.pid]) == before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run_ns([running.pid])[running.pid] > before[running.pid] > 0
        assert is_running(running.pid)
    finally:
        running.kill()
        running.wait()


def test_who_only_waits_while_it_must_stand_still_is_noticed() -> None:
    """A process that something woke may have hardly run, but it does not stand."""
    running = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(60)"])

    def awaits(awake: bool) -> bool:
        deadline = time.monotonic() + 20
        while was_woken(running.pid) != awake and time.monotonic() < deadline:
            time.sleep(0.01)
        return was_woken(running.pid) == awake

    try:
        assert awaits(True)
        assert running.pid in stop_below(os.getpid()) and not was_woken(running.pid)
        os.kill(running.pid, signal.SIGCONT)
        assert awaits(True)
    finally:
        running.kill()
        running.wait()


def test_a_candidate_is_timed_beside_eager() -> None:
    verdict = judge(FOLDER / "small.py", FOLDER / "rewritten.py", confined=False, timing=QUICK)
    assert verdict.word == "accepted", verdict.lines()
    assert [each.name for each in verdict.times] == ["forward", "train"]
    for each in verdict.times:
        assert [one.subject for one in each.times] == ["candidate", "eager"]
        assert each.rounds >= 2 and each.sets >= 1 and each.empty_us > each.floor_us > 0
        assert all(one.median_us > each.floor_us for one in each.times)
        assert each.speedups[0].baseline == "eager" and each.speedups[0].value > 0
    assert verdict.conditions is not None and verdict.conditions.copy_bytes_per_s > 1e8
    assert "as fast as eager" in verdict.reason


@pytest.mark.parametrize(
    ("name", "processes_made"),
    [("exit_at_load", 1), ("every_fifth_call", 2), ("ends_while_timed", 2)],
)
def test_a_fault_ends_the_baselines(
    name: str, processes_made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start when the candidate has been built, and nothing of them is left."""
    tokens: list[str] = []

    def watched(token: str) -> None:
        tokens.append(token)
        processes.end_all(token)

    monkeypatch.setattr(process, "end_all", watched)
    threads = threading.active_count()
    verdict = judge(FOLDER / "small.py", FOLDER / f"{name}.py", confined=False, timing=QUICK)
    assert verdict.word in ("wrong", "crashed", "dishonest"), verdict.lines()
    assert [with_token(each) for each in tokens] == [[]] * processes_made
    assert threading.active_count() == threads and not process._RUNNING


def judged_where_eager_fails(folder: Path, line: str, failing: str) -> Verdict:
    """A verdict on a good file. `failing` stands before this line of the problem; it may ask
    whether it is `elsewhere`, in a process of the judge."""
    text = (FOLDER / "small.py").read_text()
    elsewhere = f"elsewhere = {TOKEN!r} in __import__('os').environ"
    indent = " " * (len(line) - len(line.lstrip()))
    changed = "".join(f"{indent}{each}\n" for each in (elsewhere, failing)) + line
    assert line in text
    (folder / "picky.py").write_text(text.replace(line, changed))
    path = FOLDER / "rewritten.py"
    verdict = judge(folder / "picky.py", path, confined=False, timing=QUICK)
    assert verdict.word == "accepted", verdict.lines()
    return verdict


def test_a_baseline_that_fails_is_named(tmp_path: Path) -> None:
    """Without eager there are no times, but there is a verdict."""
    line = "        super().__init__()"
    verdict = judged_where_eager_fails(tmp_path, line, "assert not elsewhere, 'no'")
    assert not verdict.times
    assert any(each.startswith("eager failed: ") for each in verdict.notes), verdict.notes


def test_a_baseline_that_cannot_train_is_timed_forward(tmp_path: Path) -> None:
    """What fails in one pass is left out of that pass only."""
    line = "        return torch.tanh("
    failing = "assert not elsewhere or not torch.is_grad_enabled()"
    verdict = judged_where_eager_fails(tmp_path, line, failing)
    assert [each.name for each in verdict.times] == ["forward"]
    assert any("eager failed: AssertionError" in each for each in verdict.notes), verdict.notes
