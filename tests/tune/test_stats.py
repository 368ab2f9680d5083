"""Statistics of the benchmark: intervals that cover, ratios without common drift, comparisons."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from fusewright.bench.clock import Look, Sample, settle
from fusewright.bench.record import (
    ClockFacts,
    Environment,
    ProblemFacts,
    Record,
    Settings,
)
from fusewright.bench.regressions import changes, differences
from fusewright.bench.summary import collect
from fusewright.tune import stats
from fusewright.tune.stats import change, median_interval, speedup
from tests.support.bench_records import made_up_record

EVENTS = ClockFacts("device events", 1, 2, idle_gap_us=8.0)


def test_interval_is_between_the_order_statistics_of_the_sign_test() -> None:
    found = median_interval([float(value) for value in range(1, 21)])
    assert (found.low, found.value, found.high) == (6.0, 10.5, 15.0)
    few = median_interval([3.0, 1.0, 2.0])
    assert (few.low, few.value, few.high) == (1.0, 2.0, 3.0)
    many = median_interval([float(value) for value in range(401)])
    assert many.value == 200 and 178 <= many.low <= 181 and 219 <= many.high <= 222


@pytest.mark.parametrize("count", [12, 31, 250])
def test_interval_covers_the_true_median(count: int) -> None:
    draw = random.Random(count)
    hits = 0
    for _ in range(400):
        found = median_interval([draw.expovariate(1.0) for _ in range(count)])
        hits += found.low <= 0.6931 <= found.high
    assert hits >= 0.93 * 400


def test_speedup_ignores_drift_that_hits_both() -> None:
    draw = random.Random(1)
    drift = [100 * (1 + round_ / 50) for round_ in range(100)]
    slow = [each * 2 * draw.gauss(1, 0.001) for each in drift]
    fast = [each * draw.gauss(1, 0.001) for each in drift]
    found = speedup(slow, fast)
    assert found.value == pytest.approx(2, rel=0.01)
    assert 1.98 < found.low <= found.value <= found.high < 2.02
    # Taken as separate runs the same samples say much less.
    apart = change(fast, slow)
    assert apart.high - apart.low > 10 * (found.high - found.low)


@pytest.mark.parametrize("count", [5, 8, 30])
def test_intervals_of_ratios_cover_the_true_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "_RESAMPLES", 400)
    draw = random.Random(count)
    hits = {"speedup": 0, "change": 0}
    for turn in range(200):
        slow, fast = (
            [base * (1 + 0.05 * draw.expovariate(1.0)) for _ in range(count)] for base in (3.0, 2.0)
        )
        for name, found in (
            ("speedup", speedup(slow, fast, seed=turn)),
            ("change", change(fast, slow, seed=turn)),
        ):
            hits[name] += found.low <= 1.5 <= found.high
    assert min(hits.values()) >= 0.93 * 200, hits


def test_speedup_of_equal_samples_holds_one() -> None:
    draw = random.Random(2)
    first, second = ([draw.gauss(50, 2) for _ in range(60)] for _ in range(2))
    found = speedup(first, second)
    assert found.low < 1 < found.high
    assert found.value == statistics.median(first) / statistics.median(second)


def test_work_behind_the_stream_is_counted() -> None:
    waited = Sample(100.0, 109.0)
    honest = [Sample(100.0 + i, 110.0 + i) for i in range(9)]
    looks = [Look(each, waited) for each in honest]
    assert settle(honest, looks, EVENTS) == ([100.0 + i for i in range(9)], "stream")
    hidden = [Sample(5.0, 5.0 + 9.0 + 95.0) for _ in range(9)]
    looks = [Look(each, waited) for each in hidden]
    assert settle(hidden, looks, EVENTS) == ([100.0] * 9, "device")


@pytest.mark.parametrize(
    ("new", "verdict", "worse"),
    [(100.5, "same", False), (110.0, "slower", True), (90.0, "faster", False)],
)
def test_changes_beyond_noise(new: float, verdict: str, worse: bool) -> None:
    old = [made_up_record("p", {"eager": 200.0, "ours": 100.0})]
    found = changes(old, [made_up_record("p", {"eager": 240.0, "ours": new})])
    by_name = {each.candidate: each for each in found}
    assert by_name["ours"].verdict == verdict
    # A baseline that got slower is the machine's doing.
    assert by_name["eager"].verdict == "slower"
    assert any(each.is_regression for each in found) is worse


def test_a_time_that_is_lost_or_coarser_is_a_regression() -> None:
    old = made_up_record("p", {"eager": 200.0, "ours": 100.0})
    first, second = old.passes[0].results
    wrong = replace(second, status="wrong", timing=None, note="output is off")
    gone = replace(old, passes=(replace(old.passes[0], results=(first, wrong)),))
    (lost,) = [each for each in changes([old], [gone]) if each.candidate == "ours"]
    assert (lost.verdict, lost.note, lost.is_regression) == ("lost", "output is off", True)
    faster = made_up_record("p", {"eager": 200.0, "ours": 50.0}, precision="tf32")
    (coarse,) = [each for each in changes([old], [faster]) if each.candidate == "ours"]
    assert (coarse.verdict, coarse.note, coarse.is_regression) == ("coarser", "fp32 → tf32", True)


def test_what_differs_between_runs_is_said() -> None:
    base = Environment("H100", "cpu", "1", {"torch": "2.11"}, {}, {}, "", "")
    old = [replace(made_up_record("p", {"eager": 1.0}), environment=base)]
    new = [replace(old[0], environment=replace(base, device="H200"))]
    assert differences(old, new) == ["device: H100 → H200"]
    quick = replace(old[0], settings=replace(old[0].settings, mode="eval", quick=True))
    assert differences(old, [quick]) == ["mode: train → eval", "quick: False → True"]
    other = replace(old[0], problem=replace(old[0].problem, source_sha256="11"))
    assert differences(old, [other]) == ["the source of p"]


def test_a_problem_that_crashes_now_says_so() -> None:
    old = made_up_record("p", {"eager": 200.0, "ours": 100.0})
    dead = Record(old.problem, old.settings, status="crashed", error="killed by SIGSEGV")
    found = {each.candidate: each for each in changes([old], [dead])}
    assert found["ours"].verdict == "lost" and found["ours"].is_regression
    assert found["ours"].note == "crashed: killed by SIGSEGV"


def test_problems_of_one_name_in_two_folders_are_told_apart() -> None:
    def pair(first: float, second: float) -> list[Record]:
        made = [made_up_record("p", {"eager": 200.0, "ours": each}) for each in (first, second)]
        return [
            replace(each, problem=replace(each.problem, path=f"{place}/p.py"))
            for place, each in enumerate(made)
        ]

    found = changes(pair(100.0, 50.0), pair(50.0, 100.0))
    verdicts = {each.problem: each.verdict for each in found if each.candidate == "ours"}
    assert verdicts == {"0/p.py": "faster", "1/p.py": "slower"}


def test_collections_put_the_worst_first_and_count_the_spread() -> None:
    fast = made_up_record("fast", {"eager": 400.0, "ours": 100.0})
    slow = made_up_record("slow", {"eager": 100.0, "ours": 100.0})
    dead = Record(ProblemFacts("dead", "", ""), Settings("cpu"), status="crashed", error="no")
    found = collect([fast, slow, dead])
    assert [each.problem.name for each in found.records] == ["dead", "slow", "fast"]
    (spread,) = found.spreads
    assert spread.problems == 3
    assert (spread.count, spread.geometric_mean, spread.median) == (2, pytest.approx(2.0), 2.5)
    assert spread.shares == {"1": 0.5, "1.5": 0.5, "2": 0.5, "4": 0.0}
