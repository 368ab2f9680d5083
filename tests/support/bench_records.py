"""A problem that is quick to measure, and made-up records of its measurement."""

from __future__ import annotations

from fusewright.bench.record import (
    CandidateFacts,
    Pass,
    ProblemFacts,
    Ratio,
    Record,
    Result,
    Settings,
    Timing,
)

LINEAR_PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gemm = nn.Linear(width, 2 * width)

    def forward(self, x):
        return torch.relu(self.gemm(x))


def get_inputs():
    return [torch.randn(64, 96)]


def get_init_inputs():
    return [96]
"""
NEW_CLASS = "\n\nclass ModelNew(Model):\n"


def made_up_record(name: str, medians: dict[str, float], precision: str = "fp32") -> Record:
    results = []
    for candidate, median in medians.items():
        samples = tuple(median * (1 + 0.002 * (i % 5 - 2)) for i in range(30))
        timing = Timing(samples, median, median * 0.996, median * 1.004, min(samples), True, "wall")
        ratio = () if candidate == "eager" else (Ratio("eager", medians["eager"] / median, 1, 1),)
        results.append(Result(candidate, "timed", "", precision, timing, ratios=ratio))
    facts = tuple(CandidateFacts(c, "eager" if c == "eager" else "ours") for c in medians)
    return Record(
        ProblemFacts(name, f"{name}.py", "00"),
        Settings("cpu"),
        candidates=facts,
        passes=(Pass("forward", "train", 30, 1.0, None, tuple(results)),),
    )
