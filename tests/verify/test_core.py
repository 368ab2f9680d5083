"""One core for both commands: what `verify` asks, `bench` asks too, and the other way round."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusewright.bench.record import Record, Settings
from fusewright.errors import VerifyError
from fusewright.problem.load import candidate_factory, load_problem
from fusewright.verify import reference, scenarios
from fusewright.verify.compare import Check, Values, compare, compare_answers
from fusewright.verify.scenarios import SCENARIOS, Expected, Results, Scenario, asked
from fusewright.verify.verify import verify
from tests.support.bench_as_ours import bench_as_ours

PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(24, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return torch.relu(self.norm(self.gemm(x)))


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, change):
        return change.as_strided(change.shape, (change.shape[1], 1), 0)


def get_inputs():
    return [torch.randn(32, 24)]


def get_init_inputs():
    return []
"""
NEW = "\n\nclass ModelNew(Model):\n"
SAME = "    pass\n"
FORWARD = "    def forward(self, x):\n        "
# Each is wrong in one way only: the words that both commands find it by.
WRONG = {
    "stale weights": (
        "    kept = None\n\n"
        + FORWARD
        + "self.kept = self.gemm.weight.detach().clone() if self.kept is None else self.kept\n"
        "        y = nn.functional.linear(x, self.kept, self.gemm.bias)\n"
        "        return torch.relu(self.norm(y + (self.gemm.weight - self.gemm.weight.detach())"
        ".sum() * 0))\n",
        "new parameters: output",
    ),
    "swallows NaN": (
        FORWARD + "y = super().forward(x)\n        return torch.fmax(y, torch.zeros(()))\n",
        "NaN: output",
    ),
    "contiguous gradients only": (
        FORWARD + "return Flat.apply(super().forward(x))\n",
        "grad ",
    ),
    "another output": (
        FORWARD + "y = super().forward(x)\n"
        "        return y if torch.is_grad_enabled() else (y, x)\n",
        "returns output[0], output[1] where the model returns output",
    ),
    "initial statistics": (
        FORWARD + "y = self.gemm(x) / (1 + 1e-5) ** 0.5 * self.norm.weight + self.norm.bias\n"
        "        return super().forward(x) if self.training else torch.relu(y)\n",
        "output",
    ),
    "a flag": (
        FORWARD + "torch.backends.cudnn.deterministic = True\n        return super().forward(x)\n",
        "leaves a global PyTorch flag changed (cudnn.deterministic False → True)",
    ),
}
SETTINGS = Settings(
    "cpu", "eval", baselines=("eager",), quick=True, budget_s=0.1, least_rounds=6, input_sets=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("core")
    (made / "small.py").write_text(PROBLEM)
    for name, body in {"same": SAME, **{name: body for name, (body, _) in WRONG.items()}}.items():
        (made / f"{name}.py").write_text(PROBLEM + NEW + body)
    return made


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    files = [folder / f"{name}.py" for name in ("same", *WRONG)]
    return bench_as_ours(folder / "small.py", files, SETTINGS)


def verified(folder: Path, name: str) -> str:
    """What `verify` says is wrong."""
    problem = load_problem(folder / "small.py")
    make = candidate_factory(folder / f"{name}.py", problem)
    try:
        report = verify(problem, make, device="cpu", modes=["eval"])
    except VerifyError as error:
        return str(error)
    return "; ".join(each.name for each in report.checks if not each.ok)


def benched(record: Record, name: str) -> str:
    """What `bench` says is wrong, in either pass."""
    results = [r for each in record.passes for r in each.results if r.candidate == name]
    wrong = [each.name for result in results for each in result.checks if not each.ok]
    return "; ".join([*(each.note for each in results if each.status != "timed"), *wrong])


@pytest.mark.parametrize("name", WRONG)
def test_both_commands_catch_it(folder: Path, record: Record, name: str) -> None:
    words = WRONG[name][1]
    assert words in verified(folder, name)
    assert words in benched(record, name)


def test_both_commands_let_the_model_itself_through(folder: Path, record: Record) -> None:
    assert verified(folder, "same") == ""
    assert benched(record, "same") == ""
    assert {r.status for each in record.passes for r in each.results} >= {"timed", "wrong"}


def test_both_commands_refuse_other_parameters(folder: Path) -> None:
    path = folder / "frozen.py"
    body = "    def __init__(self):\n        super().__init__()\n"
    path.write_text(f"{PROBLEM}{NEW}{body}        self.gemm.bias.requires_grad_(False)\n")
    problem = load_problem(folder / "small.py")
    words = r"gemm.bias is float32\[16\] in .* and float32\[16\] with gradient in the model"
    with pytest.raises(VerifyError, match=words):
        verify(problem, candidate_factory(path, problem), device="cpu")
    record = bench_as_ours(folder / "small.py", [path], SETTINGS)
    assert re.search(words, benched(record, "frozen"))


def large(leaf: object) -> object:
    return leaf * 1000 if isinstance(leaf, Tensor) else leaf


def test_a_scenario_added_to_the_table_is_asked_by_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = FORWARD + "return super().forward(x) * (1.05 if x.abs().max() > 100 else 1)\n"
    (folder / "off.py").write_text(PROBLEM + NEW + body)
    assert verified(folder, "off") == ""
    more = (Scenario("large inputs", alter=large), Scenario("large", gradients=True, alter=large))
    monkeypatch.setattr(scenarios, "SCENARIOS", (*SCENARIOS, *more))
    record = bench_as_ours(folder / "small.py", [folder / "off.py"], SETTINGS)
    for said in (verified(folder, "off"), benched(record, "off")):
        assert "large inputs: output" in said and "large: output" in said


def test_a_comparison_added_to_the_core_is_made_by_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stricter(found: Results, layout: str, expected: Expected) -> Iterator[Check]:
        yield from compare_answers(found, layout, expected)
        yield compare("zero", Values(found["output"], torch.zeros(32, 16), None, 1.0))

    monkeypatch.setattr(reference, "compare_answers", stricter)
    record = bench_as_ours(folder / "small.py", [folder / "same.py"], SETTINGS)
    assert "zero" in verified(folder, "same")
    assert "zero" in benched(record, "same")


def test_scenarios_that_are_asked_once_are_asked_in_the_last_mode() -> None:
    labels = [each.label for each in asked(("train", "eval"))]
    assert labels == [
        "train",
        "train, no_grad",
        "eval",
        "eval, no_grad",
        "eval, no_grad, NaN",
        "eval, new parameters",
        "eval, no_grad, new parameters",
        "eval, second call",
        "eval, no_grad, second call",
    ]
    assert [each.label for each in asked(("train",))][2:] == [
        f"train, {each}"
        for each in (
            *("no_grad, NaN", "new parameters", "no_grad, new parameters"),
            *("second call", "no_grad, second call"),
        )
    ]


def test_a_single_element_that_is_off_is_wrong_without_a_class_too() -> None:
    truth = torch.randn(400, 400, dtype=torch.float64)
    eager = truth.float()
    ours = eager.clone()
    assert compare("y", Values(ours, eager, truth, 1.0)).ok
    ours[3, 5] += 1.5e-4  # too little to show in the norm
    found = compare("y", Values(ours, eager, truth, 1.0))
    assert found.error <= found.allowed and not found.ok
    assert "single element" in found.note
    assert replace(found, ok=True, precision="fp32").badness < found.badness
