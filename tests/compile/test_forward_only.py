"""A model that PyTorch cannot differentiate: kernels without gradients, and one message."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusewright
from fusewright.compile.module import Optimized
from fusewright.errors import CaptureError
from tests.support.command_line import fusewright as command
from tests.support.emitted_files import emitted

PYTORCHS_ERROR = "has been modified by an inplace operation"


class Residual(nn.Module):
    """The gradient of ReLU needs its result, which the next line changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.linear(x)))
        y += x  # the line
        z: Tensor = self.linear(y)
        return z


class InPlaceLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        z: Tensor = self.relu(y) * 2
        return z


class OnlyInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.linear(x))
        return y if self.training else y.mul_(2)


class Differentiable(nn.Module):
    """Changed in place, but nothing needs the old values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y += x
        return y.relu_() * 3


def optimized(model: nn.Module) -> tuple[nn.Module, list[str]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ours = fusewright.optimize(model, torch.randn(5, 6))
    return ours, [str(each.message) for each in heard]


def test_one_message_names_both_lines() -> None:
    _, said = optimized(Residual())
    (words,) = said
    lines = Path(__file__).read_text().split("\n")
    line = 1 + next(n for n, text in enumerate(lines) if text.endswith("# the line"))
    start = "in train and eval mode, calls with gradients run the original forward"
    assert words.startswith(f"{start}: {__file__}:{line}: PyTorch cannot differentiate Residual")
    assert f"the gradient of line {line - 1} needs its old values" in words
    assert words.endswith("y += x  # the line")


@pytest.mark.parametrize("kind", [Residual, InPlaceLayer, OnlyInEvaluation])
def test_forward_is_right_and_backward_raises_pytorchs_error(kind: type[nn.Module]) -> None:
    model = kind()
    ours, said = optimized(copy.deepcopy(model))
    assert len(said) == 1
    x = torch.randn(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (ours, copy.deepcopy(ours)):
            for training in (True, False):
                theirs, mine = copy.deepcopy(model).train(training), run.train(training)
                mine.load_state_dict(theirs.state_dict())
                with torch.no_grad():
                    torch.testing.assert_close(mine(x), theirs(x))
                torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
                assert_same_backward(mine(x), theirs(x))
                torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
    assert isinstance(ours, Optimized)


def assert_same_backward(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs)
    assert mine.requires_grad
    errors = []
    for each in (mine, theirs):
        try:
            torch.autograd.backward(each.sum())
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    assert errors[0] == errors[1]
    assert not errors[0] or PYTORCHS_ERROR in errors[0]


def test_without_gradients_the_kernels_run() -> None:
    ours, _ = optimized(InPlaceLayer())
    ran: list[int] = []

    def counted(run: Any, *args: Tensor) -> Any:
        ran.append(1)
        return run(*args)

    for mode in ours.__dict__["_fw_engine"].modes:
        mode.inference = functools.partial(counted, mode.inference)
    with torch.no_grad():
        ours(torch.randn(5, 6))
        ours(torch.randn(9, 6))
    assert len(ran) == 2
    ours(torch.randn(5, 6))
    assert len(ran) == 2, "with gradients the original runs"
    for each in ours.parameters():
        each.requires_grad_(False)
    ours(torch.randn(5, 6))
    assert len(ran) == 3, "no tensor requires a gradient"


def test_a_pickle_says_nothing_new() -> None:
    ours, _ = optimized(Residual())
    again = pickle.loads(pickle.dumps(ours))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            torch.testing.assert_close(
                again.eval()(torch.ones(5, 6)), ours.eval()(torch.ones(5, 6))
            )


def test_a_change_in_place_that_no_gradient_minds_is_fused_as_before() -> None:
    ours, said = optimized(Differentiable())
    assert said == []
    y = ours(torch.randn(5, 6))
    assert type(y.grad_fn).__name__ == "_FwFunctionBackward"
    torch.autograd.backward(y.sum())


PROBLEM = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = F.relu(self.linear(x))
        y += x
        return torch.tanh(y)


def get_inputs():
    return [torch.randn(5, 6)]


def get_init_inputs():
    return []
"""


def test_an_emitted_file_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, names, (x,) = emitted(PROBLEM, tmp_path, monkeypatch)
    torch.manual_seed(0)
    model: Any = names["Model"]()
    torch.manual_seed(0)
    ours: Any = names["ModelNew"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            torch.testing.assert_close(ours(x), model(x))
    with pytest.warns(RuntimeWarning, match="PyTorch cannot differentiate Model"):
        y = ours(x)
    assert_same_backward(y, model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_backward(ours(x), model(x))


def test_the_command_checks_forward_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM)
    done = command("optimize", "problem.py", "--json", "record.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("PyTorch cannot differentiate Model") == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert all(each["ok"] for each in record["checks"]) and record["checks"]
    assert not any("grad " in each["name"] for each in record["checks"])
    notes = "\n".join(record["notes"])
    assert "no gradients: PyTorch itself cannot compute them" in notes
    assert "forward+backward was not timed" in notes
    assert list(record["timings_ms"]) == ["eager forward", "ours forward"]
    header = (tmp_path / "problem_new.py").read_text().split('"""')[1]
    assert "calls with gradients run the original forward" in " ".join(header.split())


class ForInference(nn.Module):
    """Raises if gradients are wanted, as some operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.requires_grad:
            raise NotImplementedError("no gradients here")
        return y * 2


def test_a_model_that_only_runs_without_gradients() -> None:
    model, x = ForInference(), torch.randn(3, 4)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, warnings.catch_warnings():
            warnings.simplefilter("error")
            fast = fusewright.optimize(model, x)
            torch.testing.assert_close(fast(x), model(x))
        with pytest.raises(NotImplementedError, match="no gradients here"):
            fast(x)
        with mode:
            torch.testing.assert_close(fast(x), model(x))


def test_a_model_that_runs_neither_with_gradients_nor_without() -> None:
    with pytest.raises(CaptureError, match="cannot capture Linear"):
        fusewright.optimize(nn.Linear(4, 4), torch.randn(3, 5))
