"""The interleaved run, the inputs it renews, and what the profiler's trace is read as."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch

from fusewright.bench.clock import DeviceClock, Look, Sample, WallClock
from fusewright.bench.plan_record import roof_us, step_times
from fusewright.bench.record import ClockFacts, Rates, Settings
from fusewright.bench.sampling import sample
from fusewright.bench.trace import kernel_times, launches, read_trace
from fusewright.compile.pipeline import prepare
from fusewright.plan.steps import Call, Fused
from fusewright.problem.inputs import named_tensors
from fusewright.problem.load import Problem
from fusewright.tune.stats import speedup
from fusewright.verify.feeds import Feed, make_feed
from tests.support.live_problems import problem_from_module


class Ticking:
    """A clock that believes what the call says."""

    facts = ClockFacts("wall clock", 0, 0, 0.0)

    def flush(self) -> None: ...

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        took = float(call())  # type: ignore[arg-type]
        return Sample(took, took)

    def look(self, call: Callable[[], object]) -> Look:
        seen = self.sample(call, exposed=True)
        return Look(seen, Sample(seen.device_us, seen.device_us + self.gap_us(seen.device_us)))

    def gap_us(self, length_us: float) -> float:
        """What a synchronisation takes that waits so long."""
        return self.facts.idle_gap_us

    def keep_busy(self, call_us: float) -> float:
        return call_us


def problem() -> Problem:
    return problem_from_module(torch.nn.Linear(4, 4), torch.rand(3, 4))


def feed(sets: int = 3) -> Feed:
    return make_feed(problem(), torch.device("cpu"), sets=sets, seed=0)


def test_every_round_runs_all_in_a_new_order() -> None:
    order: list[str] = []

    def said(name: str) -> Callable[[int], float]:
        def call(slot: int) -> float:
            order.append(name)
            return 10.0 + len(order) % 7  # Never converges.

        return call

    settings = Settings("cpu", budget_s=60, least_rounds=5, most_rounds=40)
    found = sample({name: said(name) for name in "abc"}, feed(), Ticking(), settings)
    assert found.rounds == 40
    timed = order[-120:]
    rounds = [tuple(timed[i : i + 3]) for i in range(0, 120, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) == 6
    assert {len(each.samples_us) for each in found.timings.values()} == {40}


@pytest.mark.by_the_clock
def test_rounds_stop_when_the_medians_are_known_or_the_budget_is_spent() -> None:
    steady = sample({"a": lambda slot: 10.0}, feed(), Ticking(), Settings("cpu", budget_s=60))
    assert steady.rounds == 20 and steady.timings["a"].converged
    begun = time.perf_counter()

    def noisy(slot: int) -> float:
        time.sleep(0.002)
        return 10.0 + time.perf_counter_ns() % 10

    wide = sample({"a": noisy}, feed(), Ticking(), Settings("cpu", budget_s=0.2, most_rounds=10**6))
    assert time.perf_counter() - begun < 5
    assert not wide.timings["a"].converged
    slow = sample({"a": noisy}, feed(), Ticking(), Settings("cpu", budget_s=1e-6))
    assert slow.rounds == 6


def test_one_that_fails_is_dropped_and_the_others_go_on() -> None:
    calls = 0

    def failing(slot: int) -> float:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise RuntimeError("out of luck\nand more")
        return 1.0

    settings = Settings("cpu", budget_s=60)
    found = sample({"good": lambda slot: 10.0, "bad": failing}, feed(), Ticking(), settings)
    assert found.failures == {"bad": "RuntimeError: out of luck"}
    assert list(found.timings) == ["good"] and len(found.timings["good"].samples_us) == 20


class Suspicious(Ticking):
    """A device clock on which one call leaves 90 µs of work to another stream."""

    facts = ClockFacts("device events", 0, 0, idle_gap_us=10.0)

    def __init__(self) -> None:
        self.exposed: list[tuple[float, bool]] = []

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        took = float(call())  # type: ignore[arg-type]
        self.exposed.append((took, exposed))
        # Unless the device is idle at the start, the other stream works while the cache is flushed.
        hidden = (90.0 if exposed else 0.0) if took == 1.0 else 0.0
        return Sample(took, took + 10.0 + hidden)

    def look(self, call: Callable[[], object]) -> Look:
        seen = super().look(call)
        self.exposed.pop()  # A look is no sample.
        return seen


def test_whoever_works_on_another_stream_is_timed_from_an_idle_device() -> None:
    clock = Suspicious()
    calls = {"hidden": lambda slot: 1.0, "honest": lambda slot: 91.0}
    found = sample(calls, feed(), clock, Settings("cuda", budget_s=60)).timings
    assert (found["hidden"].counted, found["hidden"].median_us) == ("device", 91.0)
    assert (found["honest"].counted, found["honest"].median_us) == ("stream", 91.0)
    timed = clock.exposed[-2 * len(found["honest"].samples_us) :]
    assert {exposed for took, exposed in timed if took == 1.0} == {True}
    assert {exposed for took, exposed in timed if took == 91.0} == {False}


class SlowToWake(Suspicious):
    """A host that sleeps while it waits, and wakes the later the longer it slept."""

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        seen = super().sample(call, exposed=exposed)
        return Sample(seen.stream_us, seen.stream_us + self.gap_us(seen.stream_us))

    def gap_us(self, length_us: float) -> float:
        return 10.0 + 0.05 * length_us


class SlowHost(SlowToWake):
    """Calls take so long to return that the device would wait, unless it is kept busy."""

    busy_us = 0.0

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        seen, call_us = super().sample(call, exposed=exposed), 400.0
        idle = max(0.0, call_us - (0.0 if exposed else self.busy_us))
        return Sample(seen.stream_us + idle, seen.device_us + idle, call_us)

    def keep_busy(self, call_us: float) -> float:
        self.busy_us = 1.5 * call_us
        return self.busy_us


def test_a_slow_host_counts_for_no_one() -> None:
    found = sample({"a": lambda slot: 100.0}, feed(), SlowHost(), Settings("cuda", budget_s=60))
    assert found.busy_us == 600.0
    assert found.timings["a"].median_us == 100.0


def test_nobody_is_suspected_for_a_host_that_is_slow_to_wake() -> None:
    calls = {"short": lambda slot: 20.0, "long": lambda slot: 3000.0}
    found = sample(calls, feed(), SlowToWake(), Settings("cuda", budget_s=60)).timings
    assert {each.counted for each in found.values()} == {"stream"}
    assert [each.median_us for each in found.values()] == [20.0, 3000.0]


def honest_for(calls: int) -> Callable[[int], float]:
    """A candidate that turns to another stream after so many calls."""
    made = itertools.count(1)
    return lambda slot: 91.0 if next(made) <= calls else 1.0


def test_whoever_turns_to_another_stream_later_is_found() -> None:
    calls = {"late": honest_for(30), "honest": lambda slot: 91.0}
    found = sample(calls, feed(), Suspicious(), Settings("cuda", budget_s=60)).timings
    assert (found["late"].counted, found["late"].median_us) == ("device", 91.0)
    assert (found["honest"].counted, found["honest"].median_us) == ("stream", 91.0)


def test_who_hides_in_some_runs_only_gets_no_time() -> None:
    # The last one is honest until the other's second run.
    calls = {"late": honest_for(30), "last": honest_for(90), "honest": lambda slot: 91.0}
    settings = Settings("cuda", budget_s=60, least_rounds=40, most_rounds=40)
    found = sample(calls, feed(), Suspicious(), settings)
    assert set(found.timings) == {"late", "honest"}
    assert "other streams" in found.failures["last"]


class Recorded:
    """An event of a device whose time is the count of fills and calls."""

    now_ms = 0.0

    def record(self) -> None:
        self.at_ms = Recorded.now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Recorded) -> float:
        return other.at_ms - self.at_ms


def test_the_device_clock_writes_for_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(L2_cache_size=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("fusewright.bench.clock.device_event", Recorded)
    fills: list[int] = []

    def fill(buffer: torch.Tensor, value: int) -> torch.Tensor:
        fills.append(value)
        Recorded.now_ms += 0.030
        return buffer

    monkeypatch.setattr(torch.Tensor, "fill_", fill)
    clock = DeviceClock(torch.device("cpu"))
    assert clock.facts.flush_bytes > 2 * clock.facts.cache_bytes

    def written(call_us: float) -> tuple[float, int]:
        busy_us, before = clock.keep_busy(call_us), len(fills)
        assert clock.sample(lambda: None).stream_us == 0.0
        return pytest.approx(busy_us), len(fills) - before

    assert written(1000.0) == (1500.0, 50)
    assert written(1.0) == (210.0, 7)  # not less: a host hesitates now and then
    assert written(1e9) == (50010.0, 1667)
    assert len(set(fills)) == len(fills)  # other values each time


def moment_between(budget_s: float) -> int:
    """How many calls there were before the one moment between."""
    calls: list[int] = []
    heard: list[tuple[int, list[str]]] = []

    def call(slot: int) -> float:
        calls.append(slot)
        return 10.0

    def between(names: Sequence[str]) -> None:
        heard.append((len(calls), list(names)))

    settings = Settings("cpu", budget_s=budget_s)
    sample({"a": call}, feed(), Ticking(), settings, between=between)
    ((moment, names),) = heard
    assert names == ["a"]
    return moment


def test_the_moment_between_comes_once_and_is_not_foreseen() -> None:
    moments = {moment_between(60.0) for _ in range(12)}
    assert len(moments) > 3 and max(moments) <= 6 + 20
    # Six rounds there are in any case: fewer have no interval.
    assert moment_between(1e-6) <= 2 + 6


def busy(seconds: float) -> Callable[[int], None]:
    def call(slot: int) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return call


@pytest.mark.by_the_clock
def test_equal_work_comes_out_equal_and_known_work_as_much_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This thread's own time: what else the machine does is not work of these calls.
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    settings = Settings("cpu", budget_s=3.0, least_rounds=15)
    calls = {"one": busy(0.002), "same": busy(0.002), "half more": busy(0.003)}
    times = sample(calls, feed(), WallClock(), settings).timings
    one, same, more = (times[name].samples_us for name in calls)
    assert speedup(one, same).value == pytest.approx(1, rel=0.02)
    assert speedup(more, one).value == pytest.approx(1.5, rel=0.03)


def test_inputs_are_new_at_every_call_and_stay_where_they_are() -> None:
    fed = feed()
    places = [[each.data_ptr() for _, each in named_tensors(slot)] for slot in fed.slots]
    assert len({place for slot in places for place in slot}) == 3
    versions = [each._version for slot in fed.slots for _, each in named_tensors(slot)]
    seen = set()
    for turn in range(30):
        slot = fed.refresh()
        assert slot == turn % 3
        ((_, mine),) = named_tensors(fed.slots[slot])
        seen.add(float(mine.detach().double().sum()))
        assert float(mine.detach().min()) >= 0 and float(mine.detach().max()) <= 1
    assert len(seen) == 30
    assert places == [[each.data_ptr() for _, each in named_tensors(s)] for s in fed.slots]
    assert versions == [each._version for slot in fed.slots for _, each in named_tensors(slot)]


def test_values_never_come_from_the_original_that_was_there_before() -> None:
    fed = feed()
    originals = [next(named_tensors(each))[1] for each in fed.masters]

    def source(slot: int) -> int:
        ((_, mine),) = named_tensors(fed.slots[slot])
        ratios = [(mine.detach() / each).std() for each in originals]
        return min(range(3), key=lambda place: float(ratios[place]))

    held = [source(fed.refresh()) for _ in range(3)]
    for turn in range(30):
        now = source(fed.refresh())
        assert now not in (held[turn % 3], held[(turn - 1) % 3])
        held[turn % 3] = now


def event(category: str, name: str, start: float, length: float, **args: object) -> dict:  # type: ignore[type-arg]
    thread = args.pop("thread", 1)
    return {"cat": category, "name": name, "ts": start, "dur": length, "tid": thread, "args": args}


def gpu_call(start: float) -> list[dict]:  # type: ignore[type-arg]
    """A flush outside, then mm and our kernel on one thread, and a kernel of backward's thread."""
    n = int(start)
    return [
        event("cpu_op", "aten::fill_", start, 2),
        event("cuda_runtime", "cudaLaunchKernel", start + 1, 1, correlation=n),
        event("kernel", "fill", start + 5, 50, correlation=n),
        event("user_annotation", "fusewright.call", start + 10, 80),
        event("cpu_op", "aten::mm", start + 12, 10),
        event("cpu_op", "aten::empty", start + 13, 1),
        event("cuda_runtime", "cudaLaunchKernel", start + 15, 1, correlation=n + 1),
        event("kernel", "sgemm", start + 60, 30, correlation=n + 1),
        event("user_annotation", "fusewright.kernel custom_add_relu", start + 30, 5),
        event("cuda_runtime", "cudaLaunchKernel", start + 32, 1, correlation=n + 2),
        event("kernel", "pointwise<custom_add_relu_body>", start + 90, 4, correlation=n + 2),
        event("cuda_driver", "cuLaunchKernel", start + 50, 1, correlation=n + 3, thread=2),
        event("kernel", "other", start + 94, 6, correlation=n + 3),
    ]


def test_device_work_belongs_to_the_call_that_launched_it() -> None:
    trace = read_trace([*gpu_call(1000), *gpu_call(2000)])
    assert trace.calls == 2
    assert launches(trace) == 3
    rows = {row.name: (row.launches, row.time_us) for row in kernel_times(trace)}
    assert rows == {
        "sgemm": (1, 30),
        "other": (1, 6),
        "pointwise<custom_add_relu_body>": (1, 4),
    }
    owners = {work.name: work.owner for work in trace.work}
    assert owners["sgemm"] == "aten::mm"
    assert owners["pointwise<custom_add_relu_body>"] == "fusewright.kernel custom_add_relu"
    assert owners["other"] == ""


class LinearRelu(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm = torch.nn.Linear(8, 16, bias=False)
        self.bias = torch.nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.gemm(x) + self.bias)


def test_steps_of_the_plan_get_their_kernels_and_roofs() -> None:
    cpu = torch.device("cpu")
    (plans,) = prepare(LinearRelu(), (torch.randn(4, 8),), modes=("train",), device=cpu).modes
    trace = read_trace([*gpu_call(1000), *gpu_call(2000)])
    rates = Rates(copy_bytes_per_s=1e6, products={"fp32": 1e6})
    product, fused = step_times(plans, "forward", trace, rates, "fp32")
    assert (product.kind, product.time_us, product.operations) == ("call", 30.0, 2 * 4 * 8 * 16)
    assert product.operations_per_s == pytest.approx(1024 / 30e-6)
    assert product.roof_us == pytest.approx(1024) and product.roof_share == pytest.approx(1024 / 30)
    assert (fused.step, fused.time_us, fused.launches) == ("custom_add_relu", 4.0, 1)
    assert fused.bytes == 4 * (64 + 16 + 64)
    assert fused.roof_us == pytest.approx(fused.bytes)
    # The training step has three products, the trace one: nobody can say which it was.
    assert all(
        row.time_us is None
        for row in step_times(plans, "train", trace, rates, "fp32")
        if row.kind == "call"
    )


def test_all_our_products_have_the_roof_of_the_tensor_cores() -> None:
    rates = Rates(1e12, {"fp32": 1e6, "tf32": 8e6, "fp16": 12e6, "bf16": 12e6})
    costs = {"bytes_moved": 1, "operations": 12}
    names = {"name": "", "inputs": (), "outputs": (), "operators": ()}
    steps: list[Fused | Call] = [
        Fused(kernel=make_dataclass("Kernel", ["on_tensor_cores"])(cores), **names, **costs)
        for cores in (True, False)
    ]
    steps.append(Call(None, (), "", **costs))  # type: ignore[arg-type]
    ours, loop, call = ([roof_us(step, rates, x) for x in ("fp32", "tf32")] for step in steps)
    assert ours == pytest.approx([3.0, 1.0])
    assert call == pytest.approx([12.0, 1.5]) and loop == [1e-6, 1e-6]
