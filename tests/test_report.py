"""The lines that `optimize` ends with."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from fusewright.compile.pipeline import prepare
from fusewright.outcome import Outcome, header
from fusewright.report import print_checks, print_plans, summary
from fusewright.verify.compare import Check

CHECKS = (
    Check("output", 1.25e-7, 2.5e-7, 1e-6, True),
    Check("grad x", 3e-7, 2e-7, 1e-6, True),
)
TIMES = {
    "eager forward": 3.0,
    "ours forward": 1.5,
    "eager forward+backward": 9.0,
    "ours forward+backward": 2.0,
}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    prepared = prepare(model, (torch.randn(4, 8),), device=torch.device("cpu"))
    return Outcome(
        "problem", "cpu", "both", prepared.modes, "out.py", checks=CHECKS, timings_ms=TIMES
    )


def test_three_lines_say_what_was_fused_how_exact_and_how_fast(outcome: Outcome) -> None:
    fused, right, faster = summary(outcome)
    counts = r"\d operators? in 1 kernel"
    assert re.fullmatch(rf"Fused:  forward {counts}; backward {counts}; PyTorch runs mm\.", fused)
    assert "2 checks" in right and "3.0e-07, eager PyTorch's is 2.0e-07" in right
    assert faster == "Faster: forward 2.00×, forward+backward 4.50× as fast as eager PyTorch."


def printed(show: Callable[[Console], None]) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=160))
    return stream.getvalue()


def test_a_short_plan_is_shown_step_by_step(outcome: Outcome) -> None:
    text = printed(lambda console: print_plans(console, outcome.plans, details=False))
    assert "fused: add → relu" in text and "PyTorch call: PyTorch's matmul" in text


def test_a_long_plan_is_one_row_for_each_pass_and_each_reason_once() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Tanh())]
    args = (torch.randn(4, 8),)
    plans = prepare(nn.Sequential(*layers), args, device=torch.device("cpu")).modes
    text = printed(lambda console: print_plans(console, plans, details=False))
    assert "custom_" not in text
    row = next(line for line in text.splitlines() if "train: forward, when" in line)
    assert re.search(r"│ +16 │ +8 │ +8 │", row)
    assert text.count("it is the fastest one on this CPU") == len(re.findall(r"aten\.\w*mm", text))
    assert "custom_add_tanh" in printed(lambda console: print_plans(console, plans, details=True))


def test_of_many_checks_the_wrong_and_the_nearest_to_their_bounds_are_shown() -> None:
    right = [Check(f"grad {at}", at * 1e-8, 1e-7, 1e-6, True) for at in range(40)]
    checks = [*right, Check("grad bias", 1e-3, 1e-7, 1e-6, False)]
    text = printed(lambda console: print_checks(console, checks, details=False))
    shown = re.findall(r"grad (\w+)", text)
    assert shown == ["bias", "39", "38", "37", "36", "35", "34"] and "WRONG" in text
    assert "34 more checks, all ok" in text
    whole = printed(lambda console: print_checks(console, checks, details=True))
    assert len(re.findall(r"grad (\w+)", whole)) == 41 and "more checks" not in whole


def test_what_is_slower_is_not_called_faster(outcome: Outcome) -> None:
    slower = replace(outcome, timings_ms={"eager forward": 1.0, "ours forward": 2.0})
    assert summary(slower)[-1] == "Speed:  forward 0.50× as fast as eager PyTorch."


def test_nothing_is_said_where_nothing_was_timed(outcome: Outcome) -> None:
    assert summary(replace(outcome, timings_ms={})) == ()


def test_checks_against_eager_are_not_called_checks_against_float64(outcome: Outcome) -> None:
    beside = Check("train: output", 1e-5, 0.0, 1e-4, True, float64=False)
    some = replace(outcome, checks=(*CHECKS, beside), notes=("train: by slices " * 12,))
    assert "2 checks against float64 and 1 against eager PyTorch passed" in summary(some)[1]
    # The largest error is that against float64.
    assert "3.0e-07, eager PyTorch's is 2.0e-07" in summary(some)[1]
    text = header(some)
    assert "2 checks against float64 and 1 against eager PyTorch; largest" in text
    assert "\n- train: by slices train: by slices" in text
    assert max(map(len, text.splitlines())) <= 100
