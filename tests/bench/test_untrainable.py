"""Models whose training steps PyTorch itself cannot repeat: only forward is timed, and the record
says why."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fusewright.bench.record import Settings
from fusewright.bench.run import bench
from fusewright.bench.side_by_side import time_models
from fusewright.bench.summary import is_good
from fusewright.problem.load import load_problem

HEAD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.state = torch.zeros(4, 8)

"""
TAIL = """

def get_inputs():
    return [torch.rand(4, 8)]


def get_init_inputs():
    return []
"""
FORWARDS = {
    "inplace operation": """
    def forward(self, x):
        y = torch.relu(self.layer(x))
        y += x
        return torch.tanh(y)
""",
    "a second time": """
    def forward(self, x):
        self.state = torch.tanh(self.layer(x) + self.state)
        return self.state * 2
""",
}
SETTINGS = Settings(
    "cpu", baselines=("eager",), quick=True, budget_s=0.2, least_rounds=7, input_sets=2
)


@pytest.mark.parametrize("words", FORWARDS)
def test_the_training_pass_is_left_out_with_its_reason(words: str, tmp_path: Path) -> None:
    path = tmp_path / "untrainable.py"
    path.write_text(HEAD + FORWARDS[words] + TAIL)
    problem = load_problem(path)
    times = time_models(problem, problem.make_model, device="cpu", budget_s=0.1)
    assert list(times.ms) == ["eager forward", "ours forward"]
    note = times.notes[0]
    assert note.startswith("forward+backward was not timed") and words in note
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the original forward runs
        record = bench(path, [], SETTINGS)
    forward, train = record.passes
    assert [each.status for each in forward.results] == ["timed", "timed"]
    assert {each.status for each in train.results} == {"skipped"}
    assert all(words in each.note for each in train.results)
    assert is_good(record)
