"""Timings: medians of interleaved calls, in milliseconds."""

from __future__ import annotations

import time

import pytest

from fusewright.tune.timing import time_ms


@pytest.mark.by_the_clock
def test_medians_are_milliseconds_and_calls_alternate() -> None:
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
