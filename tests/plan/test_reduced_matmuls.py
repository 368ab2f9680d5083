"""A product's result, reduced in its epilogue: what is planned, and the kernels by emulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen.source import Rounded, Source, Workspace
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import Dim
from fusewright.plan.steps import Product
from fusewright.rewrite import matmuls as products
from fusewright.runtime import tensor_cores
from fusewright.schedule import tensor_core
from fusewright.target.target import Target
from tests.support.emulated_modules import TRAINED, as_exact_as_eager, on_library, trained
from tests.support.tensor_cores_on_host import on_host, with_stand_in

Forward = Callable[[nn.Module, Tensor], object]


class Layer(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, forward: Forward, columns: int, contracted: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(contracted, columns, bias=bias)
        self.norm = nn.BatchNorm1d(columns)
        self.scale = nn.Parameter(torch.rand(columns) + 0.5)
        self.follows = forward

    def forward(self, x: Tensor) -> object:
        return self.follows(self, x)


class Layers(nn.Module):
    """Layers of inputs of their own: one text for g++, which has to read the kernels once."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        return tuple(out for each in made for out in (each if isinstance(each, tuple) else (each,)))


def normed(m: nn.Module, x: Tensor) -> Tensor:
    return F.silu(m.norm(m.linear(x)))  # type: ignore[operator]


def row_sums(m: nn.Module, x: Tensor) -> Tensor:
    return (torch.relu(m.linear(x)) * m.scale).sum(-1)  # type: ignore[operator]


def row_squares(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.linear(x)  # type: ignore[operator]
    return (y * y).mean(-1), y.amax(-1).detach()


def one_best(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Backward looks for what equals the largest: it must find it, in 16 bits too."""
    y = m.linear(x)  # type: ignore[operator]
    return F.gelu(y).amax(0), y


def row_logsumexp(m: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(m.linear(x)).logsumexp(-1, keepdim=True) * 2  # type: ignore[operator]


def column_logsumexp(m: nn.Module, x: Tensor) -> Tensor:
    return (m.linear(x) * m.scale).logsumexp(0)  # type: ignore[operator]


def column_means(m: nn.Module, x: Tensor) -> Tensor:
    return m.linear(x).mean(0) * m.scale  # type: ignore[operator]


def column_sums(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(m.linear(x))  # type: ignore[operator]
    return y.sum((0, 1)) if y.dim() == 3 else y.sum(0), y


CASES: dict[str, tuple[Forward, Reduces]] = {
    "batch norm": (normed, Reduces.DOWN),
    "row sums": (row_sums, Reduces.ACROSS),
    "row squares": (row_squares, Reduces.ACROSS),
    "one best": (one_best, Reduces.DOWN),
    "row logsumexp": (row_logsumexp, Reduces.ACROSS),
    "column logsumexp": (column_logsumexp, Reduces.DOWN),
    "column means": (column_means, Reduces.DOWN),
    "column sums": (column_sums, Reduces.DOWN),
}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_worthwhile", lambda *_: True)


def prepared(model: nn.Module, *inputs: Tensor) -> Prepared:
    target = Target.cuda(trials=("halves", "sweeping"))
    device = inputs[0].device
    return prepare(model, inputs, modes=("train",), device=device, target=target)


def forward_product(found: Prepared) -> Product:
    (step,) = found.modes[0].forward.products
    return step


@pytest.mark.parametrize("name", CASES)
def test_what_is_planned(name: str) -> None:
    follows, reduces = CASES[name]
    model = Layer(follows, 256, 128)
    found = prepared(model, torch.randn(512, 128))
    step = forward_product(found)
    assert step.kernel.reduces is reduces
    specs = dict(found.modes[0].forward.specs)
    whole = [each for each in step.outputs if specs[each].shape == (Dim(1, ("s0",)), Dim(256))]
    # Backward reads what it needs; where that is nothing, the result is never written.
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
    """A row that is read twice is better read by one loop that holds it."""
    for follows in (
        lambda m, x: m.linear(x).softmax(-1),
        lambda m, x: F.layer_norm(m.linear(x), (256,)),
    ):
        found = prepared(Layer(follows, 256, 128), torch.randn(512, 128))
        assert forward_product(found).kernel.reduces is Reduces.NOTHING


def test_the_workspace_grows_with_the_tiles() -> None:
    down = Workspace(Dim(1024), Dim(1, ("s0",)), 128)
    assert [down.at({"s0": size}) for size in (1, 128, 129, 1000)] == [1024, 1024, 2048, 8192]
    assert eval(str(down), {"s0": 129}) == 2048 and down and not Workspace()
    assert str(Workspace(Dim(64))) == "64"


def test_the_workspace_has_room_for_what_is_rounded_first() -> None:
    size = Dim(1, ("s0",))
    rounded = Rounded((Dim(100, ("s0",)), Dim(256)), size, 200)
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


def test_batches_are_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Layer(attention, 8, 8), torch.randn(3, 140, 40), monkeypatch)


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def test_tf32_has_tiles_of_its_own(tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Layer(column_sums, 132, 40), torch.randn(300, 40), monkeypatch, least=1e-3)


def test_what_is_rounded_first_is_reduced_too(tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 302 rows on: one of the two batches is, and its parts lie before a's halves."""
    monkeypatch.setattr(tensor_core, "rounded_from", lambda *_: 302)
    names = ("batch norm", "row squares", "column sums")
    model = Layers(Layer(CASES[name][0], 132, 40) for name in names)
    source = compare(model, [torch.randn(300, 40) for _ in names], monkeypatch, least=1e-3)
    # Forward's one by one, and backward's, of which equal ones are one kernel.
    assert source.text.count("fw::rounded_product<FW_PRODUCTS") > len(names)


@pytest.mark.parametrize("follows", [row_sums, column_means])
def test_a_single_row_and_none(follows: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layer(follows, 132, 40)
    found = prepared(model, torch.randn(1, 40))
    assert forward_product(found).kernel.reduces is Reduces.NOTHING
    (fast, _), nothing = emulated(model, [torch.randn(200, 40)], monkeypatch), torch.randn(0, 40)
    for mine, theirs in zip(trained(fast, nothing), trained(model, nothing), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def emulated(
    model: nn.Module,
    inputs: Sequence[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    plans: Sequence[str] = TRAINED,
) -> tuple[nn.Module, Source]:
    """The module on its kernels, run by fibers, and their text."""
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    found = prepared(model, *inputs)
    reducing = [each.kernel.reduces for each in found.modes[0].forward.products]
    assert len(reducing) - reducing.count(Reduces.NOTHING) >= len(inputs)
    source = Source("host", on_host(found.source.text), found.source.entries)
    return on_library(model, inputs, found, source, plans), source


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
