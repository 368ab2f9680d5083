"""Algebra that saves work: which matmuls it removes, that the values stay, and that errors do, too.

Each model runs on this machine. Its errors against float64 are compared with eager mode's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.cli import cli
from fusewright.compile.pipeline import prepare
from fusewright.errors import FusewrightError
from fusewright.ir.graph import Graph, Program
from fusewright.ir.interpret import interpret
from fusewright.plan.show import show
from fusewright.rewrite import rewrite
from fusewright.target.target import Target
from tests.support.emulated_modules import trained

ROWS, INPUTS, RESULTS = 24, 40, 56


class Model(nn.Module):
    """`compute(module, x)` with a linear layer, a row, a column and a square of parameters."""

    def __init__(self, compute: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.linear = nn.Linear(INPUTS, RESULTS)
        self.row = nn.Parameter(torch.rand(RESULTS) + 0.5)
        self.weights = nn.Parameter(torch.randn(ROWS))
        self.column = nn.Parameter(torch.rand(ROWS, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def flat() -> Tensor:
    return torch.randn(ROWS, INPUTS)


def batches() -> Tensor:
    return torch.randn(3, 8, INPUTS)


SUMS: dict[str, tuple[Callable[[Model, Tensor], Tensor], Callable[[], Tensor]]] = {
    "sum": (lambda m, x: m.linear(x).sum(1), flat),
    "mean": (lambda m, x: torch.tanh(m.linear(x).mean(-1, keepdim=True)), flat),
    "all": (lambda m, x: m.linear(x).sum() * 2, flat),
    "batches": (lambda m, x: m.linear(x).mean(-1).exp(), batches),
    "of a batch": (lambda m, x: (m.linear(x) * 0.5).sum((1, 2)), batches),
    "scaled": (lambda m, x: ((m.linear(x) / 2 - 1) * 1.5).sum(1), flat),
    "rows": (lambda m, x: ((m.linear(x) - m.row) * 2 + m.row).sum(1), flat),
    "columns": (lambda m, x: ((m.column - m.linear(x)) * m.column.detach()).sum(1), flat),
    "residual": (lambda m, x: (m.linear(x) + torch.sin(x.repeat(1, 2)[:, :RESULTS])).mean(1), flat),
    "two": (lambda m, x: (m.linear(x) - m.linear(x * 2)).sum(1), flat),
    "batched": (lambda m, x: torch.bmm(x, x.mT.contiguous()).sum(2), batches),
    "diagonal left": (lambda m, x: torch.diag(m.weights) @ x, flat),
    "diagonal right": (lambda m, x: x.mT @ torch.diag(m.weights), flat),
    "diagonal of": (lambda m, x: torch.diagonal(x @ x.mT).exp(), flat),
}

OTHERS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "not linear": lambda m, x: torch.relu(m.linear(x)).sum(1),
    "a square": lambda m, x: m.linear(x).square().sum(1),
    "divided": lambda m, x: (1 / m.linear(x)).sum(1),
    "read twice": lambda m, x: (y := m.linear(x)).sum(1) + y.amax(1),
    "given out": lambda m, x: (y := m.linear(x), y.sum(1))[0] + y.sum(1, keepdim=True),
    "over rows": lambda m, x: m.linear(x).sum(0),
    "one of two results": lambda m, x: m.linear(x).view(ROWS, 7, -1).max(1)[0].mean(-1),
    "sorted": lambda m, x: (
        torch.sort(m.linear(x))[0][:, :5].sum(-1) + m.linear(x).topk(3)[0].sum(-1)
    ),
    "weighted": lambda m, x: (m.linear(x) * m.row.detach()).sum(1),
    "a view of it": lambda m, x: torch.diagonal(x @ x.mT),
    "off the diagonal": lambda m, x: torch.diag(m.weights[:-1], 1) @ x,
}


def made(
    compute: Callable[[Model, Tensor], Tensor], x: Callable[[], Tensor]
) -> tuple[Model, Tensor]:
    torch.manual_seed(3)
    return Model(compute), x()


def matmuls(graph: Graph | None) -> list[str]:
    assert graph is not None
    kinds = ("mm", "bmm", "addmm", "baddbmm")
    return [node.name for node in graph.nodes if node.is_aten and node.op.split(".")[1] in kinds]


def programs(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Program, Program]:
    """Without algebra and with it."""
    captured = capture(model, (x,), None, mode="train")
    monkeypatch.setenv("FUSEWRIGHT_ALGEBRA", "0")
    before = rewrite(captured)
    monkeypatch.undo()
    return before, rewrite(captured)


@pytest.mark.parametrize("name", SUMS)
def test_no_matmul_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = programs(*made(*SUMS[name]), monkeypatch)
    assert not before.algebra and matmuls(before.forward)
    assert after.algebra and not matmuls(after.forward) and not matmuls(after.inference)
    if name not in ("batched", "diagonal of"):  # there the gradient repeats nowhere
        assert not matmuls(after.backward)


@pytest.mark.parametrize("name", SUMS)
def test_the_values_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, forward and inference on the same inputs."""
    before, after = programs(*made(*SUMS[name]), monkeypatch)
    inputs = [
        torch.randn([n.at(before.example_sizes) for n in each.spec.shape])
        for each in before.forward.inputs
    ]
    given = sum(result.kind != "saved" for result in before.results)
    for one, other in ((before.forward, after.forward), (before.inference, after.inference)):
        assert one.inputs == other.inputs
        results = [interpret(each, inputs, before.example_sizes)[:given] for each in (one, other)]
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SUMS)
def test_errors_are_at_most_eagers(name: str) -> None:
    """Outputs and gradients on our kernels, by the norm; 1e-7 is rounding of one number."""
    model, x = made(*SUMS[name])
    ours = trained(fusewright.optimize(copy.deepcopy(model), x, modes=("train",)), x)
    eager, truth = trained(model, x), trained(copy.deepcopy(model).double(), x.double())
    assert ours[0].stride() == eager[0].stride()
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert mine.shape == theirs.shape
        size = float(exact.norm())
        allowed = max(1.1 * float((theirs.double() - exact).norm()), 1.5e-7 * size)
        assert float((mine.double() - exact).norm()) <= allowed


class Residual(nn.Module):
    """The mean difference between a linear layer's outputs and numbers near them."""

    def __init__(self, x: Tensor, results: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(x.shape[1], results))
        self.register_buffer("target", (x @ self.weight).detach() + torch.randn(len(x), results))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight - self.target).mean(1)


def test_errors_are_at_most_eagers_where_large_parts_cancel() -> None:
    torch.manual_seed(3)
    x = torch.rand(ROWS, INPUTS) * 100
    model = Residual(x, 2048)
    ours = fusewright.optimize(copy.deepcopy(model), x, modes=("train",))(x).detach()
    eager, truth = model(x).detach(), copy.deepcopy(model).double()(x.double()).detach()
    assert float((ours - truth).norm()) <= float((eager - truth).norm())


ODD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("numbers", [ODD[:1], ODD[1:2], ODD], ids=["nan", "inf", "all"])
@pytest.mark.parametrize("name", ["diagonal left", "diagonal right"])
def test_zeros_of_a_diagonal_matrix_meet_nan_and_inf(name: str, numbers: tuple[float, ...]) -> None:
    model, x = made(*SUMS[name])
    for at, number in enumerate(numbers):
        x[2 * at, 3 * at + 1] = number
    fast = fusewright.optimize(copy.deepcopy(model), x, modes=("eval",)).eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), equal_nan=True)


@pytest.mark.parametrize("name", OTHERS)
def test_what_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = programs(*made(OTHERS[name], flat), monkeypatch)
    assert matmuls(after.inference) == matmuls(before.inference) != []


def test_the_plan_names_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(*SUMS["mean"])

    def text() -> str:
        ready = prepare(model, (x,), modes=("train",), device=x.device, target=Target.host())
        return show(ready.modes[0])

    line = "  algebra: a sum over a matmul's columns is a matmul with summed weights"
    assert line in text().splitlines() and "aten.mm" not in text()
    monkeypatch.setenv("FUSEWRIGHT_ALGEBRA", "0")
    assert "algebra" not in text() and "mm" in text()


def test_another_value_of_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_ALGEBRA", "no")
    with pytest.raises(FusewrightError, match="FUSEWRIGHT_ALGEBRA='no': set it to 0 or 1"):
        model, x = made(*SUMS["sum"])
        rewrite(capture(model, (x,), None, mode="train"))


def test_the_command_line_leaves_algebra_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a linear layer and a sum, with and without."""
    problem = tmp_path / "summed.py"
    problem.write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.linear = torch.nn.Linear(8, 16)\n\n"
        "    def forward(self, x):\n        return self.linear(x).sum(1)\n\n\n"
        "def get_inputs():\n    return [torch.rand(4, 8)]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    )
    monkeypatch.setenv("FUSEWRIGHT_ALGEBRA", "1")  # put back after the test
    options = ["explain", str(problem), "--device", "cpu", "--mode", "eval"]
    told = {
        also: CliRunner().invoke(cli, [*options, *also], catch_exceptions=False).output
        for also in ((), ("--no-algebra",))
    }
    assert "algebra: a sum over a matmul's columns" in told[()] and "mm.default" not in told[()]
    assert "algebra" not in told[("--no-algebra",)] and "mm.default" in told[("--no-algebra",)]
