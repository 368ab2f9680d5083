"""Timings: medians of interleaved calls, in milliseconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fusewright.problem.load import load_problem
from fusewright.tune.timing import time_models, time_ms


def test_medians_are_milliseconds_and_calls_take_turns() -> None:
    calls: list[str] = []

    def sleeping(name: str, seconds: float) -> None:
        calls.append(name)
        time.sleep(seconds)

    found = time_ms(
        {"short": lambda: sleeping("short", 0.002), "long": lambda: sleeping("long", 0.006)},
        device="cpu",
        budget_s=0.1,
    )
    assert 2.0 <= found["short"] < found["long"]
    assert 6.0 <= found["long"] < 60
    timed = calls[4:]
    assert timed[:4] == ["short", "long", "long", "short"]
    assert timed.count("short") == timed.count("long")


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
