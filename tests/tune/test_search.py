"""Measured schedules: what is tried, refused, stored and used."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

import fusewright
from benchmarks import loop_kernels
from fusewright import build as building
from fusewright import cli
from fusewright.capture import captures
from fusewright.compile.pipeline import _run_here, prepare, prepare_programs
from fusewright.compile.stages import Stages
from fusewright.cost.matmul import BLOCK_US
from fusewright.errors import CompileFailed, FusewrightError
from fusewright.ir.graph import Dim
from fusewright.ir.kernel import Kernel
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import MatmulKernel
from fusewright.kinds.kind import Choice
from fusewright.kinds.registry import heuristic, kind_of, permitted, render
from fusewright.report import print_tuning
from fusewright.runtime.library import _FwKernels
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.schedule.tensor_core import MatmulSchedule
from fusewright.target.target import Target
from fusewright.tune import search as tune
from fusewright.tune import store as tuned
from fusewright.tune.candidates import MOST, worth_trying
from fusewright.tune.store import Tuned
from fusewright.tune.trial import CompiledSchedule, Trial, same_split_sums
from tests.support import loop_runs
from tests.support.cuda_on_host import emulated
from tests.support.plans import steps_of

S0 = Dim(1, ("s0",))
HOST, CUDA = Target.host(), Target.cuda()
CPU = torch.device("cpu")
LOOPS = (
    (loop_kernels.add_relu(S0), {"s0": 5003}),
    (loop_kernels.bias_relu(S0, 40, "float16"), {"s0": 33}),
    (loop_kernels.softmax(S0, 1000), {"s0": 5}),
    (loop_kernels.softmax(S0, 40_000), {"s0": 3}),
    (loop_kernels.layer_norm(S0, 130), {"s0": 7}),
    (loop_kernels.column_sum(S0, 264), {"s0": 300}),
    (loop_kernels.full_sum(S0), {"s0": 70_001}),
    (loop_kernels.channel_sum(S0, 3, 50), {"s0": 40}),
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's choices are stored. Kernels stay in the cache that all tests share."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSEWRIGHT_TUNED", "1")
    monkeypatch.setattr(tuned, "trusted_folder", lambda _: building.trusted_folder(folder))
    return folder / tuned.FILE


def product() -> MatmulKernel:
    model = nn.Linear(1024, 768)
    made = prepare(model, (torch.randn(2048, 1024),), device=CPU, target=CUDA, modes=("eval",))
    return steps_of(made.modes[0].inference, "matmul")[0].kernel


# What is tried ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [HOST, CUDA], ids=["host", "cuda"])
@pytest.mark.parametrize(("loop", "sizes"), LOOPS, ids=lambda each: getattr(each, "name", ""))
def test_candidates_are_few_and_legal(
    loop: LoopKernel, sizes: dict[str, int], target: Target
) -> None:
    tried = worth_trying(loop, target, sizes)
    assert tried[0] == choose(loop, target, sizes)
    assert len(set(tried)) == len(tried) <= MOST
    assert all(isinstance(each, Schedule) and legal(loop, each, target) for each in tried)
    least = 5 if target == CUDA or loop.inner else 1
    assert len(tried) >= (4 if tried[0].cluster > 1 else least)


def test_candidates_vary_what_matters() -> None:
    def varied(loop: LoopKernel, sizes: Mapping[str, int]) -> set[str]:
        tried = worth_trying(loop, CUDA, sizes)
        names = ("lanes", "threads", "rows", "across", "unroll", "cached", "splits")
        return {name for name in names if len({getattr(each, name) for each in tried}) > 1}

    assert varied(loop_kernels.add_relu(S0), {"s0": 1 << 26}) == {"lanes", "threads", "unroll"}
    assert {"threads", "unroll", "cached"} <= varied(loop_kernels.softmax(S0, 1024), {"s0": 4096})
    assert {"splits", "unroll", "threads"} <= varied(loop_kernels.full_sum(S0), {"s0": 1 << 26})
    assert {"splits", "unroll", "across"} <= varied(
        loop_kernels.column_sum(S0, 8192), {"s0": 16384}
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(("loop", "sizes"), LOOPS[2:], ids=lambda each: getattr(each, "name", ""))
def test_every_cuda_candidate_computes_the_same(loop: LoopKernel, sizes: dict[str, int]) -> None:
    tried = [each for each in worth_trying(loop, CUDA, sizes) if isinstance(each, Schedule)]
    named = [(replace(loop, name=f"{loop.name}_{at}"), each) for at, each in enumerate(tried)]
    source = emulated(render(named, CUDA))
    library = loop_runs.compile_source(source, loop_runs.EMULATED)
    bindings = {each.name: each.macro for each in source.entries}
    kernels = _FwKernels(bindings, source.text, lambda _: library)
    made = [
        CompiledSchedule(each, entry, kernels)
        for each, entry in zip(tried, source.entries, strict=True)
    ]
    assert Trial(loop, sizes, CPU, made).faults(made) == {}


def test_matmuls_try_their_tile_heights() -> None:
    kernel = product()
    tried = worth_trying(kernel, CUDA, {"s0": 2048})
    assert tried[0] == heuristic(kernel, CUDA, {"s0": 2048})
    assert {each.tile_rows for each in tried if isinstance(each, MatmulSchedule)} == set(BLOCK_US)
    assert not permitted(kernel, MatmulSchedule(7), CUDA)
    assert not permitted(kernel, Schedule("pointwise"), CUDA)
    assert not permitted(loop_kernels.full_sum(S0), MatmulSchedule(128), CUDA)


def elements_of(kernel: Kernel, **sizes: int) -> Mapping[str, int]:
    return kind_of(kernel).elements(kernel, sizes)


def test_tensors_reach_as_far_as_the_accesses() -> None:
    assert elements_of(loop_kernels.column_sum(S0, 7), s0=5) == {
        "z": 35,
        "g": 35,
        "dz": 35,
        "db": 7,
    }
    assert elements_of(loop_kernels.channel_sum(S0, 3, 4), s0=2) == {"x": 24, "y": 24, "sums": 3}
    kernel = product()
    found = elements_of(kernel, s0=300)
    names = [each.name for each in kernel.arguments]
    assert [found[name] for name in names[:4]] == [768 * 1024, 300 * 1024, 300 * 1024, 300]
    assert [found[name] for name in names[4:]] == [768, 300 * 768]


# What is refused --------------------------------------------------------------------------------


def compiled(loop: LoopKernel, *schedules: Schedule) -> list[CompiledSchedule]:
    return tune._compiled(loop, schedules, HOST, "native", Path(os.environ["FUSEWRIGHT_CACHE"]))


def test_a_candidate_that_fails_or_differs_is_found() -> None:
    loop, sizes = loop_kernels.full_sum(S0), {"s0": 1000}
    good = compiled(loop, Schedule("row", 64), Schedule("row", 16, splits=3))
    entry = good[0].entry

    def fake(call: Callable[..., int]) -> CompiledSchedule:
        kernels = SimpleNamespace(**{entry.name: call})
        return CompiledSchedule(Schedule("row"), entry, kernels)  # type: ignore[arg-type]

    def luckless(*_: object) -> int:
        raise RuntimeError("no such luck")

    silent, failing = fake(lambda *_: 0), fake(luckless)
    trial = Trial(loop, sizes, CPU, good)
    assert trial.faults([*good, silent, failing]) == {
        silent: "its result differs from the heuristic's",
        failing: "it failed: no such luck",
    }


def test_pointwise_results_are_compared_by_the_bit() -> None:
    trial = Trial(
        loop_kernels.add_relu(S0), {"s0": 64}, CPU, compiled(loop_kernels.add_relu(S0), HOST_POINT)
    )
    y = trial.tensors["y"]
    first = {"y": y.clone()}
    assert trial._agrees(first)
    y[5] = torch.nextafter(y[5], torch.tensor(9.0))
    assert not trial._agrees(first)


def test_sums_are_compared_within_rounding() -> None:
    trial = Trial(
        loop_kernels.full_sum(S0), {"s0": 100}, CPU, compiled(loop_kernels.full_sum(S0), HOST_ROW)
    )
    total = trial.tensors["y"].fill_(50.0)
    first = {"y": total.clone()}
    total.mul_(1 + 1e-6)
    assert trial._agrees(first)
    total.mul_(1 + 1e-3)
    assert not trial._agrees(first)
    total.fill_(torch.nan)
    assert not trial._agrees(first) and trial._agrees({"y": total.clone()})


HOST_POINT, HOST_ROW = Schedule("pointwise", 1024), Schedule("row", 64)


def test_a_candidate_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = tune.build

    def build(source, **options):  # type: ignore[no-untyped-def]
        if "fw::row<16>" in source.text:
            raise CompileFailed("too narrow")
        return real(source, **options)

    monkeypatch.setattr(tune, "build", build)
    schedules = (HOST_ROW, Schedule("row", 16), Schedule("row", 32))
    with pytest.warns(RuntimeWarning, match=r"full_sum: .*lanes=16.* is left out: .*too narrow"):
        made = compiled(loop_kernels.full_sum(S0), *schedules)
    assert [each.choice for each in made] == [HOST_ROW, Schedule("row", 32)]
    assert Trial(loop_kernels.full_sum(S0), {"s0": 99}, CPU, made).faults(made) == {}


# What is stored and used ------------------------------------------------------------------------


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, 1)


X = torch.randn(40, 300)


def source_text(**options: object) -> str:
    made = prepare(Softmax(), (X,), modes=("eval",), device=CPU, **options)  # type: ignore[arg-type]
    return made.source.text


def second_wins(
    calls: Mapping[int, Callable[[], int]], device: torch.device, budget_s: float
) -> dict[int, float]:
    return {at: 10.0 - 2 * (at == 1) for at in calls}


def unheard(words: str, share: float) -> None:
    assert 0 <= share <= 1 and words


def test_a_choice_is_stored_and_used_by_all_later_calls(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = source_text()
    monkeypatch.setattr(tune, "_times_us", second_wins)
    fast = fusewright.optimize(Softmax(), X, modes=("eval",), tune=True)
    torch.testing.assert_close(fast.eval()(X), torch.softmax(X * 2, 1))
    record = json.loads(kept.read_text())
    assert record["version"] == tuned.VERSION and len(record["choices"]) >= 1
    for entry in record["choices"].values():
        assert entry["kernel"].startswith("custom_") and entry["sizes"] == {"s0": 40}
        assert entry["schedule"] != entry["heuristic"] and entry["schedule"]["kind"] == "row"
        assert (entry["heuristic_us"], entry["best_us"]) == (10.0, 8.0)
        assert "threads" in entry["device"] and entry["date"].count("-") == 2
    monkeypatch.setattr(tune, "_measured", None)
    later = source_text()
    assert later != plain and later == source_text(tuning=unheard), "nothing is measured again"
    monkeypatch.setenv("FUSEWRIGHT_TUNED", "0")
    assert source_text() == plain


def test_another_size_is_another_entry(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_kernels.softmax(S0, 300)
    names = {tuned.key_of(loop, {"s0": size}, "chip", HOST) for size in (4, 5)}
    names |= {tuned.key_of(loop, {"s0": 4}, "chip", CUDA), tuned.key_of(loop, {"s0": 4}, "x", HOST)}
    assert len(names) == 4
    renamed = replace(loop, name="other", summary="other")
    assert tuned.key_of(renamed, {"s0": 4}, "chip", HOST) in names


def entry_of(loop: LoopKernel, schedule: Choice) -> Tuned:
    first = heuristic(loop, HOST, {"s0": 4})
    return Tuned(loop.name, "chip", (("s0", 4),), first, schedule, 4.0, 3.0, "2026-11-15")


def test_a_stored_schedule_that_is_no_longer_legal_is_not_used(kept: Path) -> None:
    loop = loop_kernels.softmax(S0, 300)
    key = tuned.key_of(loop, {"s0": 4}, tune.precise_name(CPU), HOST)
    for schedule, fits in ((Schedule("row", 32), True), (Schedule("row", 4096), False)):
        tuned.keep({key: entry_of(loop, schedule)})
        found = tune.settled([(loop, {"s0": 4})], HOST, CPU)
        assert bool(found) == fits
        expected = schedule if fits else choose(loop, HOST, {"s0": 4})
        assert tune.chosen(loop, {"s0": 4}, HOST, found.get(loop.name)) == expected


def test_only_a_gain_beyond_noise_counts(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sizes = loop_kernels.full_sum(S0), {"s0": 1000}
    made = compiled(loop, HOST_ROW, Schedule("row", 16))
    job = tune._Job(loop, sizes, "key", tuple(each.choice for each in made))
    for us, changed in ((100.0, False), (98.5, False), (97.0, True)):
        monkeypatch.setattr(tune, "_times_us", lambda *_, us=us: {0: 100.0, 1: us})
        found = tune._measured(job, made, CPU)
        assert found is not None and found.changed == changed
        assert (found.heuristic_us, found.best_us) == (100.0, us if changed else 100.0)


def test_a_lucky_first_measurement_must_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_kernels.full_sum(S0)
    made = compiled(loop, HOST_ROW, Schedule("row", 16))
    job = tune._Job(loop, {"s0": 1000}, "key", tuple(each.choice for each in made))
    rounds = iter([{0: 100.0, 1: 50.0}, {0: 100.0, 1: 101.0}])
    monkeypatch.setattr(tune, "_times_us", lambda *_: next(rounds))
    found = tune._measured(job, made, CPU)
    assert found is not None and not found.changed and next(rounds, None) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "choices": {"a": {"kind": "loop"}}}', "\xff"]
)
def test_a_damaged_file_is_ignored_with_one_warning(kept: Path, text: str) -> None:
    kept.parent.mkdir(mode=0o700)
    kept.write_text(text, encoding="latin-1")
    with pytest.warns(RuntimeWarning, match=r"tuned.json.*is ignored.*delete it") as heard:
        assert tuned.read() == {}
    assert len(heard) == 1
    loop = loop_kernels.full_sum(S0)
    tuned.keep({"key": entry_of(loop, HOST_ROW)})
    assert tuned.read() == {"key": entry_of(loop, HOST_ROW)}


def test_entries_of_other_versions_are_ignored(kept: Path) -> None:
    loop = loop_kernels.full_sum(S0)
    tuned.keep({"key": entry_of(loop, HOST_ROW)})
    record = json.loads(kept.read_text())
    record["choices"]["key"]["schedule"]["colour"] = "red"
    kept.write_text(json.dumps(record))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.read() == {}
        kept.write_text(json.dumps({**record, "version": 0}))
        assert tuned.read() == {}


def test_writers_do_not_lose_each_others_entries(kept: Path) -> None:
    entries = {
        f"key{at}": entry_of(loop_kernels.full_sum(S0), Schedule("row", at)) for at in range(1, 21)
    }
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: tuned.keep({key: entries[key]}), entries))
    assert tuned.read() == entries
    left = {path.name for path in kept.parent.iterdir()}
    assert left == {"tuned.json", "tuned.lock"} and kept.stat().st_mode & 0o077 == 0


def test_a_folder_of_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_TUNED", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path))
    tuned.keep({"key": entry_of(loop_kernels.full_sum(S0), HOST_ROW)})
    assert tuned.read()
    tmp_path.chmod(0o777)
    assert tuned.read() == {}
    with pytest.raises(FusewrightError, match="can be written by others"):
        tuned.keep({"key": entry_of(loop_kernels.full_sum(S0), HOST_ROW)})


def test_a_wrong_setting_names_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_TUNED", "maybe")
    with pytest.raises(FusewrightError, match="FUSEWRIGHT_TUNED='maybe': set it to 0 or 1"):
        tuned.read()


PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, 1)


def get_inputs():
    return [torch.randn(64, 500)]


def get_init_inputs():
    return []
"""


def test_the_command_shows_what_it_does_and_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM)
    monkeypatch.setattr(cli, "TIMING_BUDGET_S", 0.1)
    monkeypatch.setenv("FUSEWRIGHT_TUNED", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def optimize(*options: str) -> tuple[str, list[dict[str, object]]]:
        words = ["optimize", str(tmp_path / "problem.py"), "--mode", "eval", "--device", "cpu"]
        record = tmp_path / "record.json"
        done = CliRunner().invoke(cli.cli, [*words, "--json", str(record), *options])
        assert done.exit_code == 0, done.output
        return done.output, json.loads(record.read_text())["tuning"]

    shown, found = optimize("--tune")
    assert "\ntune …\n" in shown and "schedules …" in shown and "\x1b" not in shown
    assert found and (tmp_path / "cache" / "tuned.json").exists()
    shown, again = optimize()
    assert again == [{**each, **_rounded(each)} for each in found] and "tune …" not in shown


def test_the_report_says_what_changed() -> None:
    loop = loop_kernels.softmax(S0, 300)
    changed = replace(entry_of(loop, Schedule("row", 32)), heuristic_us=12.34, best_us=10.0)
    console = Console(width=120, file=io.StringIO())
    print_tuning(console, [changed, entry_of(loop, heuristic(loop, HOST, {"s0": 4}))])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    row = next(line for line in shown.splitlines() if "softmax" in line)
    words = ("lanes 64", "lanes 32", "12.3 µs", "10.0 µs", "2026-11-15")
    assert all(word in row for word in words) and "unroll" not in row
    assert "1 tuned kernel keeps the heuristic's schedule." in shown
    empty = Console(width=120, file=io.StringIO())
    print_tuning(empty, ())
    assert empty.file.getvalue() == ""  # type: ignore[attr-defined]


def test_only_what_runs_here_is_measured() -> None:
    model, x = nn.Sequential(nn.Linear(1024, 768), nn.ReLU()), torch.randn(2048, 1024)
    programs = captures(model, (x,), mode="eval")
    made = prepare_programs(programs, Stages(), device=CPU, target=CUDA, at_any_size=True)
    ours, plain = made.modes
    run = _run_here((ours, plain))
    assert {step.kernel.name for step in ours.inference.kernels} <= run
    assert (
        steps_of(plain.inference, "loop")
        and steps_of(ours.inference, "loop")[0] != steps_of(plain.inference, "loop")[0]
    )
    assert not {step.kernel.name for step in steps_of(plain.inference, "loop")} & run


def _rounded(record: Mapping[str, object]) -> dict[str, float]:
    return {name: round(float(str(record[name])), 3) for name in ("before_us", "after_us")}


def test_high_and_low_parts_of_the_same_values_agree() -> None:
    x = torch.rand(1000) + 0.5
    hi = x.half()
    made = {"hi": hi, "lo": (x - hi.float()).half(), "scale": torch.ones(3)}
    other = torch.nextafter(hi, torch.full_like(hi, 9.0))  # rounded the other way
    first = {**made, "hi": other, "lo": (x - other.float()).half()}
    assert same_split_sums(made, first, ["hi", "lo"], 1e-6)
    assert not same_split_sums(made, {**first, "hi": hi}, ["lo"], 1e-6)
    assert not same_split_sums(made, {**made, "scale": torch.zeros(3)}, ["scale"], 1e-6)
    assert same_split_sums(made, made, [], 0.0)


@pytest.mark.gpu
def test_a_gpu_is_tuned(kept: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(1024, 1024), nn.LayerNorm(1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.norm(torch.relu(self.linear(x))), 1)

    model, x = Net().cuda(), torch.randn(2048, 1024, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fusewright.optimize(model, x, modes=("train",), tune=True)
    entries = tuned.read()
    assert entries and all(each.best_us <= each.heuristic_us for each in entries.values())
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-6)
