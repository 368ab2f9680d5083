"""Candidates that are right by the values of one call only: both kinds of memory are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.problem.load import candidate_factory, load_problem
from fusewright.verify.verify import Report, verify

HEAD = """
import torch
from torch import nn


def get_inputs():
    return [torch.randn(64, 32)]


def get_init_inputs():
    return []


"""
DROPOUT = """
class Model(nn.Module):
    def forward(self, x):
        return x * (torch.rand_like(x) > 0.5)
"""
KEPT_MASK = """
class ModelNew(Model):
    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.rand_like(x) > 0.5
        else:
            torch.rand_like(x)
        return x * self.mask
"""
NORM = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(x)
"""
NO_BIAS = """
class ModelNew(Model):
    def forward(self, x):
        return super().forward(x) - self.norm.bias.detach()
"""
SOMETIMES = """
class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.wrong = bool(x.sum() > 0)
        return x.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * (10 if ctx.wrong else 1)


class ModelNew(Model):
    def forward(self, x):
        return super().forward(Wrong.apply(x))
"""


def report(folder: Path, model: str, candidate: str, seed: int) -> Report:
    (folder / "problem.py").write_text(HEAD + model)
    (folder / "new.py").write_text(HEAD + model + candidate)
    problem = load_problem(folder / "problem.py")
    return verify(problem, candidate_factory(folder / "new.py", problem), device="cpu", seed=seed)


RIGHT = "\n\nclass ModelNew(Model):\n    ...\n"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("model", "candidate", "ok"),
    [
        (DROPOUT, RIGHT, True),
        (DROPOUT, KEPT_MASK, False),
        (NORM, RIGHT, True),
        (NORM, NO_BIAS, False),
    ],
    ids=["dropout", "a kept mask", "norm", "a bias left out"],
)
def test_remembered_values(tmp_path: Path, model: str, candidate: str, ok: bool, seed: int) -> None:
    assert report(tmp_path, model, candidate, seed).ok is ok


def test_a_gradient_that_is_wrong_half_of_the_time(tmp_path: Path) -> None:
    """It is found unless every look of every scenario happens to be right."""
    found = [report(tmp_path, NORM, SOMETIMES, seed).ok for seed in range(12)]
    assert sum(found) <= 3, found
