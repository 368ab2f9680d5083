"""The progress of a command: one line on a terminal, short plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fusewright import progress
from fusewright.progress import Steps

NAMES = ("load", "plan", "check")


def steps_on(*, terminal: bool) -> tuple[Steps, io.StringIO]:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=terminal, width=80)
    return Steps(console, NAMES, animated=False), drawn


def test_without_a_terminal_each_step_is_a_line() -> None:
    steps, drawn = steps_on(terminal=False)
    with steps.running():
        for name in NAMES:
            steps.next(name)
            steps.stage(f"{name} something", 0.5)  # too soon after the step for another line
            steps.detail("and more", 0.6)
    assert drawn.getvalue() == "load …\nplan …\ncheck …\n"


def test_a_long_step_says_what_it_is_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    steps, drawn = steps_on(terminal=False)
    with steps.running():
        steps.next("plan")
        for second in range(7):
            now = 100.0 + second
            steps.stage(f"operators [{second // 3}]", second / 10)
    assert drawn.getvalue().splitlines() == [
        "plan …",
        "  operators [0] … 20%",
        "  operators [1] … 40%",
        "  operators [2] … 60%",
    ]


def test_on_a_terminal_one_line_changes() -> None:
    steps, drawn = steps_on(terminal=True)
    with steps.running():
        steps.next("plan")
        steps.drawn = 0.0
        steps.stage("operators [train]", 0.5)
        assert steps.progress.tasks[0].completed == 1.5
        steps.line("plan", "a schedule", 0.6)
        assert steps.progress.tasks[0].completed == 1.6
        steps.line("check", "another one", 2.0)
        assert steps.progress.tasks[0].completed == 2.99
    shown = drawn.getvalue()
    assert "operators [train]" in shown and "…" not in shown
    assert "\n" not in shown.rstrip("\n").split("operators [train]")[1].split("check")[0]
