"""A model of which a mode cannot be captured as one graph: Dynamo cuts it into several. A file
cannot, so the command says that the original forward runs."""

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


def test_a_mode_that_cannot_be_captured_goes_through_dynamo() -> None:
    model = Averaging()
    x = torch.randn(6, 4)
    expected = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fast = fusewright.optimize(model, x)
        for training in (True, False):
            for run in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
                theirs = copy.deepcopy(expected).train(training)
                run.load_state_dict(expected.state_dict())
                torch.testing.assert_close(run.train(training)(x), theirs(x))
                torch.testing.assert_close(run.state_dict(), theirs.state_dict())
    assert isinstance(fast, Optimized)
    evaluated = fast.eval()(x.requires_grad_())
    assert type(evaluated.grad_fn).__name__ == "_FwFunctionBackward"
    ((mode, reason),) = fusewright.explain(fast).left_out
    assert mode == "train" and "depends on the values" in reason


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(x * self.weight)
        return y[y > 0.5].sum() if y.sum() > 12 else torch.tanh(y) * 3


def test_a_model_without_any_mode_goes_through_dynamo() -> None:
    model = Picking()
    theirs = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fast = fusewright.optimize(model, torch.randn(6, 4))
        for x in (torch.zeros(6, 4), 9 * model.weight.detach().sign().expand(6, 4)):
            torch.testing.assert_close(fast(x), theirs(x))
            for each in (fast, theirs):
                each.zero_grad()
                each(x).sum().backward()
            torch.testing.assert_close(model.weight.grad, theirs.weight.grad)
    told = fusewright.explain(fast)
    assert "depends on the values" in told.torch_compile and told.breaks and not told.fallbacks
    assert any(each.fused for each in told.graphs)


def test_what_eager_refuses_is_an_error() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(7, 7)

    with pytest.raises(CaptureError, match=r"test_left_out\.py:"):
        fusewright.optimize(Wrong(), torch.randn(6, 4))


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
