"""Matmuls with reductions in their epilogue: what is planned, and the kernels by emulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.codegen.source import RoundedWorkspace, Source, Workspace
from fusewright.compile.pipeline import Prepared
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import Dim
from fusewright.plan.steps import Fused
from fusewright.rewrite import matmuls
from fusewright.schedule import tensor_core
from tests.support.emulated_modules import as_exact_as_eager, trained
from tests.support.plans import steps_of
from tests.support.reduced_matmuls import (
    CASES,
    Forward,
    Layer,
    column_means,
    column_sums,
    emulated,
    prepared,
    row_sums,
)


class Layers(nn.Module):
    """Layers with separate inputs as one model: g++ reads the kernels once."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        return tuple(out for each in made for out in (each if isinstance(each, tuple) else (each,)))


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)


def forward_matmul(found: Prepared) -> Fused:
    (step,) = steps_of(found.modes[0].forward, "matmul")
    return step


@pytest.mark.parametrize("name", CASES)
def test_which_reductions_go_into_the_epilogue(name: str) -> None:
    follows, reduces = CASES[name]
    model = Layer(follows, 256, 128)
    found = prepared(model, torch.randn(512, 128))
    step = forward_matmul(found)
    assert step.kernel.reduces is reduces
    specs = dict(found.modes[0].forward.specs)
    whole = [each for each in step.outputs if specs[each].shape == (Dim(1, ("s0",)), Dim(256))]
    # If backward reads nothing of the result, it is never written.
    assert [specs[each].dtype for each in whole] == {
        "batch norm": ["float32"],
        "row sums": ["float32"],
        "row squares": ["float32"],
        "one best": ["float32"],
        "row logsumexp": ["float32"],
        "column logsumexp": ["float32"],
        "column means": [],
        "column sums": ["float32"],
    }[name]


def test_sweeps_that_read_again_stay_loops() -> None:
    """One loop that holds a row is faster than reading it twice."""
    for follows in (
        lambda m, x: m.linear(x).softmax(-1),
        lambda m, x: F.layer_norm(m.linear(x), (256,)),
    ):
        found = prepared(Layer(follows, 256, 128), torch.randn(512, 128))
        assert forward_matmul(found).kernel.reduces is Reduces.NOTHING


def test_the_workspace_grows_with_the_tiles() -> None:
    down = Workspace(Dim(1024), Dim(1, ("s0",)), 128)
    assert [down.at({"s0": size}) for size in (1, 128, 129, 1000)] == [1024, 1024, 2048, 8192]
    assert eval(str(down), {"s0": 129}) == 2048 and down and not Workspace()
    assert str(Workspace(Dim(64))) == "64"


def test_the_workspace_has_room_for_rounded_operands() -> None:
    size = Dim(1, ("s0",))
    rounded = RoundedWorkspace((Dim(100, ("s0",)), Dim(256)), size, 200)
    both, alone = Workspace(Dim(1024), size, 128, rounded=rounded), Workspace(rounded=rounded)
    for rows, more in ((199, 0), (200, 20256)):
        for terms, wanted in ((1, more), (3, 0)):
            names = {"s0": rows, "terms": terms}
            assert eval(str(both), names) == 2048 + wanted
            assert eval(str(alone), names) == wanted
        assert both.at({"s0": rows}) == 2048 + more and alone.at({"s0": rows}) == more
    assert both and alone and set(both.dims) >= {size, Dim(100, ("s0",))}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rows", "columns", "contracted"), [(300, 132, 40), (129, 257, 70), (5, 64, 64)]
)
@pytest.mark.parametrize("names", [list(CASES)[:4], list(CASES)[4:]], ids=lambda names: names[0])
def test_emulated_modules_train_as_eager_does(
    names: list[str], rows: int, columns: int, contracted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layers(
        Layer(CASES[name][0], columns, contracted, bias=name != "column means") for name in names
    )
    compare(model, [torch.randn(rows, contracted) for _ in names], monkeypatch)


def test_emulated_modules_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("batch norm", "row sums", "column sums", "one best")
    model = Layers(Layer(CASES[name][0], 136, 40, bias=name != "one best") for name in names)
    compare(model.bfloat16(), [torch.randn(300, 40).bfloat16() for _ in names], monkeypatch)


def attention(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x @ x.mT).sum(-1), torch.sigmoid(x @ x.mT).sum((0, 1))


def test_each_batch_has_partial_results_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Layer(attention, 8, 8), torch.randn(3, 140, 40), monkeypatch)


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def test_tf32_has_its_own_tiles(tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Layer(column_sums, 132, 40), torch.randn(300, 40), monkeypatch, least=1e-3)


def test_results_of_rounded_operands_are_reduced(
    tf32: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 302 rows on one of the two batches is rounded; its partial results precede the fp16
    copy."""
    monkeypatch.setattr(tensor_core, "rounded_from", lambda *_: 302)
    names = ("batch norm", "row squares", "column sums")
    model = Layers(Layer(CASES[name][0], 132, 40) for name in names)
    source = compare(model, [torch.randn(300, 40) for _ in names], monkeypatch, least=1e-3)
    # Those of forward one by one, then those of backward, where equal ones share a kernel.
    assert source.text.count("fw::rounded_matmul<FW_MATMULS") > len(names)


@pytest.mark.parametrize("follows", [row_sums, column_means])
def test_a_single_row_and_an_empty_batch(follows: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layer(follows, 132, 40)
    found = prepared(model, torch.randn(1, 40))
    assert forward_matmul(found).kernel.reduces is Reduces.NOTHING
    (fast, _), nothing = emulated(model, [torch.randn(200, 40)], monkeypatch), torch.randn(0, 40)
    for mine, theirs in zip(trained(fast, nothing), trained(model, nothing), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def compare(
    model: nn.Module, x: Tensor | list[Tensor], monkeypatch: pytest.MonkeyPatch, least: float = 2e-6
) -> Source:
    """The module on emulated kernels and eager, both with float64; outputs and gradients."""
    inputs = [x] if isinstance(x, Tensor) else x
    fast, source = emulated(model, inputs, monkeypatch)
    for more in (0, 3):
        again = [
            torch.randn(each.shape[0] + more, *each.shape[1:]).to(each.dtype) for each in inputs
        ]
        as_exact_as_eager(fast, model, again, least)
    return source
