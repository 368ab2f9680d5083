"""A whole benchmark of a small problem: who gets a time, in which class, and beside which floor."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusewright.bench import storage
from fusewright.bench.record import Collection, Pass, Record, Result, Settings
from fusewright.bench.run import bench
from fusewright.judge.processes import missing_confinement
from tests.support.bench_as_ours import bench_as_ours
from tests.support.bench_records import LINEAR_PROBLEM, NEW_CLASS

CANDIDATES = {
    "same": "    pass\n",
    "wrong": "    def forward(self, x):\n        return super().forward(x) * 1.1\n",
    "one_wrong": """    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[:-1], torch.cat([y[-1:, :-1], y[-1:, -1:] + 0.5], 1)])
""",
    "unwritten": """    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[:-1], torch.empty_like(y)[-1:]]) if not y.requires_grad else y
""",
    "by_address": """    kept = {}

    def forward(self, x):
        if x.requires_grad and torch.is_grad_enabled():
            return super().forward(x)
        return self.kept.setdefault(x.data_ptr(), super().forward(x))
""",
    "when_timed": """    kept = None

    def forward(self, x):
        # Nobody collects garbage while the clock runs.
        import gc
        if torch.is_grad_enabled() or gc.isenabled() or self.kept is None:
            self.kept = super().forward(x)
        return self.kept
""",
    "old_weights": """    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.gemm.weight.detach().clone()
        return torch.relu(nn.functional.linear(x, self.kept, self.gemm.bias))
""",
    "bfloat16": """    def forward(self, x):
        gemm = nn.functional.linear(
            x.bfloat16(), self.gemm.weight.bfloat16(), self.gemm.bias.bfloat16())
        return torch.relu(gemm.float())
""",
    "tf32": """    def forward(self, x):
        cut = lambda v, c=8193.0: v + ((v * c - (v * c - v)) - v).detach()
        return torch.relu(nn.functional.linear(cut(x), cut(self.gemm.weight), self.gemm.bias))
""",
    "clobbers": """    def forward(self, x):
        y = super().forward(x)
        return y if torch.is_grad_enabled() else y + x.zero_().sum()
""",
    "slows_others": """    def forward(self, x):
        torch.backends.cudnn.benchmark = True
        return super().forward(x)
""",
    "fails": "    def forward(self, x):\n        raise RuntimeError('no luck today')\n",
}
needs_box = pytest.mark.skipif(bool(missing_confinement()), reason=missing_confinement() or "-")
SETTINGS = Settings(
    "cpu", baselines=("eager",), quick=True, budget_s=0.6, least_rounds=7, input_sets=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bench")
    (made / "small.py").write_text(LINEAR_PROBLEM)
    for name, body in CANDIDATES.items():
        (made / f"{name}.py").write_text(LINEAR_PROBLEM + NEW_CLASS + body)
    return made


@pytest.fixture(scope="module")
def foreign(folder: Path) -> Record:
    """All the candidates above in one run."""
    files = [folder / f"{name}.py" for name in CANDIDATES]
    return bench_as_ours(folder / "small.py", files, SETTINGS, command="a command")


@pytest.fixture(scope="module")
def own(folder: Path) -> Record:
    """Our module, through the emitted file."""
    return bench(folder / "small.py", [], SETTINGS)


def result(record: Record, pass_name: str, candidate: str) -> Result:
    (each,) = [p for p in record.passes if p.name == pass_name]
    (found,) = [r for r in each.results if r.candidate == candidate]
    return found


def pass_of(record: Record, name: str) -> Pass:
    return next(each for each in record.passes if each.name == name)


def test_right_candidates_are_timed_in_their_class(foreign: Record) -> None:
    for name in ("forward", "train"):
        same = result(foreign, name, "same")
        assert (same.status, same.precision) == ("timed", "fp32"), same.note
        assert same.timing is not None and same.timing.low_us <= same.timing.median_us
        assert {each.when for each in same.checks} == {"before", "during", "after"}
        (ratio,) = same.ratios
        assert ratio.baseline == "eager" and ratio.low <= ratio.ratio <= ratio.high
    assert result(foreign, "forward", "bfloat16").precision == "bf16"
    assert result(foreign, "forward", "tf32").precision == "tf32"
    assert result(foreign, "forward", "bfloat16").timing is not None


@pytest.mark.parametrize(
    ("pass_name", "name", "words"),
    [
        ("forward", "wrong", "beyond every precision class"),
        ("train", "wrong", "beyond every precision class"),
        ("forward", "one_wrong", "beyond every precision class"),
        ("forward", "unwritten", "output before timing"),
        ("forward", "by_address", "beyond every precision class"),
        ("forward", "when_timed", "output during timing"),
        ("forward", "old_weights", "output after timing"),
    ],
)
def test_whoever_is_wrong_gets_no_time(
    foreign: Record, pass_name: str, name: str, words: str
) -> None:
    found = result(foreign, pass_name, name)
    assert found.status == "wrong" and words in found.note
    assert found.timing is None and found.ratios == () and found.floor_share is None


def test_whoever_sets_a_flag_for_all_gets_no_time(foreign: Record) -> None:
    found = result(foreign, "train", "slows_others")
    assert found.status == "failed" and found.timing is None
    assert "leaves a global PyTorch flag changed (cudnn.benchmark False → True)" in found.note
    assert not torch.backends.cudnn.benchmark


@needs_box
def test_files_are_judged_and_timed_in_processes_of_their_own(folder: Path) -> None:
    """The one accepted file has times beside eager's; the others have the judge's reason."""
    names = ("same", "bfloat16", "fails", "slows_others")
    before = set(sys.modules)
    asked = replace(SETTINGS, passes=("forward",))
    record = bench(folder / "small.py", [folder / f"{name}.py" for name in names], asked)
    assert not any("same" in name for name in set(sys.modules) - before)
    assert record.clock is not None and "judge" in record.clock.kind
    same, coarse = (result(record, "forward", name) for name in names[:2])
    assert (same.status, same.precision) == ("timed", "fp32"), same.note
    assert (coarse.status, coarse.precision) == ("timed", "bf16"), coarse.note
    for each in (same, coarse, result(record, "forward", "eager")):
        assert each.timing is not None and each.timing.low_us <= each.timing.median_us
    assert [each.baseline for each in same.ratios] == ["eager"]
    fails, slows = (result(record, "forward", name) for name in names[2:])
    assert fails.status == "failed" and "RuntimeError: no luck today" in fails.note
    assert slows.status == "wrong" and slows.note.startswith("unsafe: global state is left changed")


def test_whoever_fails_is_said_to_and_the_others_go_on(foreign: Record) -> None:
    found = result(foreign, "forward", "fails")
    assert (found.status, found.note) == ("failed", "RuntimeError: no luck today")
    assert found.timing is None


def test_whoever_writes_where_the_model_does_not_gets_no_time(foreign: Record) -> None:
    found = result(foreign, "forward", "clobbers")
    assert found.status == "wrong" and found.timing is None
    assert found.note.startswith("input x0 before timing")
    assert "writes into this argument, the model does not" in found.note


def test_a_model_that_writes_into_its_argument_is_checked_there_too(tmp_path: Path) -> None:
    head, tail = LINEAR_PROBLEM.split("        return torch.relu(self.gemm(x))\n")
    problem = f"{head}        return x.mul_(2.0) + 1\n{tail}"
    bodies = {
        "same": "    pass\n",
        "leaves_it": "    def forward(self, x):\n        return 2 * x + 1\n",
        "wrong": "    def forward(self, x):\n        return x.mul_(2.0) + 1.5\n",
    }
    for name, body in {"small": "", **bodies}.items():
        (tmp_path / f"{name}.py").write_text(problem + (NEW_CLASS + body if body else ""))
    files = [tmp_path / f"{name}.py" for name in bodies]
    asked = replace(SETTINGS, passes=("forward",), budget_s=0.2)
    record = bench_as_ours(tmp_path / "small.py", files, asked)
    assert result(record, "forward", "same").status == "timed"
    names = [each.name for each in result(record, "forward", "same").checks]
    assert names[:2] == ["output", "input x0"]
    assert result(record, "forward", "leaves_it").note.startswith("input x0 before timing")
    assert result(record, "forward", "wrong").note.startswith("output before timing")


def test_errors_stand_for_every_output_and_gradient(foreign: Record) -> None:
    checks = [each for each in result(foreign, "train", "same").checks if each.when == "before"]
    names = [each.name for each in checks]
    assert names == ["output", "grad x0", "grad gemm.weight", "grad gemm.bias"]
    for each in checks:
        assert 0 < each.error < 1e-6 and each.error == each.eager_error
        assert each.limits["fp32"] < 1e-5 and each.limits["bf16"] < 0.2
    limits = checks[0].limits
    assert 4e-4 < limits["tf32"] < 2e-3 and 4e-3 < limits["bf16"] < 2e-2


def test_the_floor_counts_what_must_move(own: Record) -> None:
    x, weight, bias, out = 64 * 96, 192 * 96, 192, 64 * 192
    forward, train = (pass_of(own, name).floor for name in ("forward", "train"))
    assert forward is not None and train is not None and own.rates is not None
    assert forward.bytes == 4 * (x + weight + bias + out)
    assert train.bytes == 2 * forward.bytes  # Gradients mirror all of it.
    assert forward.operations == 2 * 64 * 96 * 192
    assert train.operations == 3 * forward.operations
    assert forward.floor_us["memory"] == pytest.approx(
        forward.bytes / own.rates.copy_bytes_per_s * 1e6
    )
    ours = result(own, "forward", "ours")
    assert ours.timing is not None and ours.floor_share is not None
    assert ours.floor_share == pytest.approx(forward.floor_us["fp32"] / ours.timing.median_us)


def test_our_steps_have_times_and_the_plan_is_a_graph(own: Record) -> None:
    for name in ("forward", "train"):
        ours = result(own, name, "ours")
        assert (ours.status, ours.precision) == ("timed", "fp32"), ours.note
        assert ours.steps and all(each.time_us and each.roof_share for each in ours.steps)
        assert ours.peak_bytes and ours.kernel_launches == len(ours.steps)
    graphs = {each.graph: each for each in own.plan}
    assert list(graphs) == ["forward", "inference", "backward"]
    made = {name for step in graphs["inference"].steps for name in step.writes}
    held = made | set(graphs["inference"].inputs)
    assert set(graphs["inference"].outputs) <= held
    assert all(set(step.reads) <= held for step in graphs["inference"].steps)
    assert any(
        step.kind == "loop" and "relu" in step.operators for step in graphs["inference"].steps
    )


def test_costs_and_surroundings_are_recorded(own: Record, foreign: Record, folder: Path) -> None:
    (ours,) = [each for each in own.candidates if each.name == "ours"]
    assert ours.costs.optimize_seconds and ours.costs.file_bytes and ours.costs.overhead_us
    (same,) = [each for each in foreign.candidates if each.name == "same"]
    assert same.costs.file_bytes == (folder / "same.py").stat().st_size
    assert foreign.environment is not None and foreign.clock is not None
    assert foreign.environment.command == "a command"
    assert foreign.environment.versions["torch"] == torch.__version__
    assert foreign.environment.flags["float32_matmul_precision"] == "highest"
    assert foreign.clock.flush_bytes > 0 and foreign.subjects == tuple(CANDIDATES)
    assert foreign.problem.inputs == ("x0 float32[64, 96]",)


@pytest.mark.slow
def test_torch_compile_is_built_cold_and_warm(folder: Path) -> None:
    asked = replace(SETTINGS, quick=False, baselines=("eager", "compile", "cudagraphs"))
    record = bench(folder / "small.py", [], asked)
    costs = {each.name: each.costs for each in record.candidates}
    for name in ("compile", "ours"):
        cold, warm = costs[name].cold_build_seconds, costs[name].warm_build_seconds
        assert cold and warm and warm < cold
        assert result(record, "train", name).precision == "fp32"
    assert [each.baseline for each in result(record, "train", "ours").ratios] == [
        "eager",
        "compile",
    ]
    skipped = result(record, "forward", "cudagraphs")
    assert (skipped.status, skipped.note) == ("skipped", "needs a GPU")


def test_records_come_back_from_json_as_they_were(own: Record, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    odd = replace(own, seconds=math.inf)
    storage.write(path, odd)
    assert storage.read(path) == odd
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]
    body = json.loads(path.read_text())
    assert (body["schema"], body["version"]) == ("fusewright-bench", 1)
    storage.write(path, Collection((own,)))
    assert storage.read_records(path) == (own,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ('{"schema": "other"}', "not a record of `fusewright bench`"),
        ('{"schema": "fusewright-bench", "version": 99}', "schema version 99"),
        ('{"schema": "fusewright-bench", "version": 1}', "missing"),
        ('{"schema": "fusewright-bench", "version": 1, "status": 3}', "record.status is 3"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(storage.RecordError, match=words):
        storage.read(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, own: Record) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        storage.write(path, replace(own, error={1}))  # type: ignore[arg-type]
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
