"""What tests of former faults share."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn

import fusewright
from fusewright.verify.verify import verify
from tests.support.live_problems import problem_from_module


def check(model: nn.Module, *inputs: Any) -> None:
    """Compare outputs, gradients and buffers with float64; only kernels may run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*original forward.*")
        warnings.filterwarnings("error", message=".*no kernels.*")
        fast = fusewright.optimize(model, inputs)
        problem = problem_from_module(model, inputs)
        report = verify(problem, lambda: copy.deepcopy(fast), device="cpu", seed=0)
    assert report.ok, [each for each in report.checks if not each.ok]
