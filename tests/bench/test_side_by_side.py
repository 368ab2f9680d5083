"""Eager and a candidate side by side: the times that `optimize` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.bench import side_by_side
from fusewright.bench.side_by_side import time_models
from fusewright.problem.load import load_problem

# Each backward takes at least 40 ms, however busy the machine is.
SLOW_GRADIENT = """
import time
import torch
from torch import nn


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.04)
        return gradient * 2


class Model(nn.Module):
    def forward(self, x):
        return SlowGradient.apply(x)


def get_inputs():
    return [torch.rand(4, requires_grad=True)]


def get_init_inputs():
    return []
"""


@pytest.fixture(autouse=True)
def a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "other_cores", lambda before, after: 0.0)


@pytest.mark.by_the_clock
@pytest.mark.parametrize("training", [True, False])
def test_models_are_timed_beside_each_other(training: bool, tmp_path: Path) -> None:
    path = tmp_path / "slow_gradient.py"
    path.write_text(SLOW_GRADIENT)
    problem = load_problem(path)
    times = time_models(problem, problem.make_model, device="cpu", budget_s=0.2, training=training)
    assert times.notes == ()
    found = times.ms
    expected = ["eager forward", "ours forward"]
    expected += ["eager forward+backward", "ours forward+backward"] if training else []
    assert list(found) == expected
    assert all(value > 0 for value in found.values())
    for name in expected[2:]:
        assert found[name] >= 40


FAILING_GRADIENT = SLOW_GRADIENT.replace("time.sleep(0.04)", 'raise RuntimeError("too large")')


def test_a_pass_that_fails_is_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "failing_gradient.py"
    path.write_text(FAILING_GRADIENT)
    problem = load_problem(path)
    times = time_models(problem, problem.make_model, device="cpu", budget_s=0.1)
    assert list(times.ms) == ["eager forward", "ours forward"]
    failed = "forward+backward was not timed: eager forward+backward fails (too large)"
    assert times.notes == (failed,)


@pytest.mark.parametrize(("cores", "warned"), [(0.4, False), (1.75, True)])
def test_a_busy_machine_is_named_beside_the_times(
    cores: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "problem.py"
    path.write_text(SLOW_GRADIENT)
    problem = load_problem(path)
    monkeypatch.setattr(side_by_side, "other_cores", lambda before, after: cores)
    times = time_models(problem, problem.make_model, device="cpu", budget_s=0.05)
    busy = [note for note in times.notes if note.startswith(f"other processes kept {cores:.1f} of")]
    assert bool(busy) == warned and len(times.ms) == 4
