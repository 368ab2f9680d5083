"""Eager and a candidate side by side: the times that `optimize` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.bench.side_by_side import time_models
from fusewright.problem.load import load_problem


@pytest.mark.parametrize("training", [True, False])
def test_models_are_timed_beside_each_other(training: bool, examples: tuple[Path, ...]) -> None:
    problem = load_problem(next(path for path in examples if path.stem == "gemm_add_relu"))
    found = time_models(problem, problem.make_model, device="cpu", budget_s=0.2, training=training)
    expected = ["eager forward", "ours forward"]
    expected += ["eager forward+backward", "ours forward+backward"] if training else []
    assert list(found) == expected
    assert all(value > 0 for value in found.values())
    if training:
        assert found["eager forward+backward"] > found["eager forward"]
