"""A model with one mode that cannot be captured: the other is optimized, and one message says
so."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright import cli
from fusewright.compile.module import Optimized
from fusewright.errors import CaptureError
from tests.support.command_line import fusewright as command


class Averaging(nn.Module):
    """With momentum=None the new averages depend on a counter's value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x).relu()
        return y


def test_the_other_mode_is_optimized_with_one_warning() -> None:
    model = Averaging()
    x = torch.randn(6, 4)
    with pytest.warns(RuntimeWarning) as heard:
        fast = fusewright.optimize(model, x)
    (said,) = [str(each.message) for each in heard]
    assert said.startswith("in train mode the original forward runs: ")
    assert "test_left_out.py:" in said and "depends on the values" in said
    expected = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for training in (True, False):
            for run in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
                theirs = copy.deepcopy(expected).train(training)
                run.load_state_dict(expected.state_dict())
                torch.testing.assert_close(run.train(training)(x), theirs(x))
                torch.testing.assert_close(run.state_dict(), theirs.state_dict())
    assert isinstance(fast, Optimized)
    evaluated = fast.eval()(x.requires_grad_())
    assert type(evaluated.grad_fn).__name__ == "_FwFunctionBackward"


def test_a_mode_that_is_asked_for_alone_is_an_error() -> None:
    with pytest.raises(CaptureError, match="depends on the values"):
        fusewright.optimize(Averaging(), torch.randn(6, 4), modes=("train",))


def test_a_model_without_any_mode_is_an_error() -> None:
    class Picking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError, match="depends on the values"):
            fusewright.optimize(Picking(), torch.randn(6, 4))


PROBLEM = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        return self.norm(x).relu()


def get_inputs():
    return [torch.randn(6, 4)]


def get_init_inputs():
    return []
"""


def test_the_command_says_so_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM)
    done = command("optimize", "problem.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in train mode the original forward runs" in done.stderr
    text = (tmp_path / "problem_new.py").read_text()
    assert "In train mode the original forward runs: " in text.split('"""')[1]
    # Asked for alone, it is an error; in this process, which has PyTorch open.
    words = ["fusewright", "optimize", str(tmp_path / "problem.py"), "--mode", "train"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and "depends on the values" in capsys.readouterr().err
