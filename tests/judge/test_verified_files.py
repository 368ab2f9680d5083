"""`verify` asks a file in the judge's process: it sees nothing of ours, and its end is not ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fusewright.errors import ProblemError, VerifyError
from fusewright.judge.boxed import Boxed
from fusewright.judge.process import Limits
from fusewright.judge.processes import missing_confinement
from fusewright.problem.load import load_problem
from fusewright.verify.verify import Report, verify_respondent

HOST = torch.device("cpu")
CONFINED = not missing_confinement()
PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.table = torch.randn(8)
        self.state = None

    def forward(self, x):
        self.state = x if self.state is None else (0.5 * self.state.detach() + x)
        return torch.tanh(self.norm(self.state)) * self.table


def get_inputs():
    return [torch.randn(6, 8)]


def get_init_inputs():
    return []
"""
NEW = "\n\nclass ModelNew(Model):\n"
FORWARD = "    def forward(self, x):\n"


def verified(folder: Path, body: str, seconds: float = 120.0) -> Report:
    (folder / "problem.py").write_text(PROBLEM)
    (folder / "new.py").write_text(PROBLEM + NEW + body)
    problem = load_problem(folder / "problem.py")
    with Boxed(problem, folder / "new.py", HOST, Limits(seconds), confined=CONFINED) as boxed:

        def respondent(model: nn.Module) -> Boxed:
            return boxed

        return verify_respondent(problem, respondent, HOST, ("eval",))


def test_state_and_tensor_attributes_reach_the_other_process(tmp_path: Path) -> None:
    """A hidden state goes on from its last value, and a table that is no buffer is the model's."""
    before = {name for name in sys.modules if name.endswith("_new")}
    report = verified(tmp_path, "    pass\n")
    assert report.ok, [each for each in report.checks if not each.ok]
    names = {each.name for each in report.checks}
    assert {"eval: output", "eval, second call: grad x0", "eval, new parameters: output"} <= names
    assert {name for name in sys.modules if name.endswith("_new")} == before


MORE_THREADS = "        torch.set_num_threads(1 + torch.get_num_threads())\n"
NO_BIAS = "    def __init__(self):\n        super().__init__()\n        self.norm.bias = None\n"
SCALED = "        self.norm.weight.data.mul_(1.5)\n"
ANSWERED = "        return super().forward(x)\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"{FORWARD}        import os\n        os._exit(0)\n", "exit code 0 before it had"),
        (f"{FORWARD}        raise RuntimeError('no luck')\n", "fails in eval: .*no luck"),
        (FORWARD + MORE_THREADS + ANSWERED, "global state is left changed: threads"),
        (FORWARD + SCALED + ANSWERED, "a call changes the parameters"),
        (NO_BIAS, r"norm\.bias is missing"),
    ],
)
def test_faults_are_errors_of_verify(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(VerifyError, match=words):
        verified(tmp_path, body)


def test_wrong_values_are_checks_that_fail(tmp_path: Path) -> None:
    """Functions of the comparison that a file replaces are not those that compare."""
    patch = "        torch.isfinite = torch.allclose = lambda *given: True\n"
    report = verified(
        tmp_path, "    def forward(self, x):\n        return super().forward(x) * 1.01\n"
    )
    assert not report.ok
    with pytest.raises(VerifyError, match=r"replaces torch\.allclose"):
        verified(tmp_path, FORWARD + patch + ANSWERED)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM)
    problem = load_problem(tmp_path / "problem.py")
    with pytest.raises(ProblemError, match="there is no such file"):
        Boxed(problem, tmp_path / "new.py", HOST, Limits(), confined=CONFINED)
