"""Indices of largest and smallest values, and the gradients that go there, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusewright
from fusewright.capture import scatters
from fusewright.rewrite import arg_extremes as extremes
from tests.support.models import ARG_EXTREMES, Lambda
from tests.support.plans import pytorch_operators

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extremes, "PAIRS_ON", ("cpu", "cuda"))
    monkeypatch.setattr(scatters, "LOOPS", ("cpu", "cuda"))


def ours(function: Callable[..., object], *args: Tensor) -> object:
    model = Lambda(function)
    assert not pytorch_operators(model, *args)
    return fusewright.optimize(model, args)(*args)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8"])
def test_indices(dtype: str) -> None:
    """Of several shapes, along each of their dimensions."""
    torch.manual_seed(3)
    wanted = list(itertools.product(ARG_EXTREMES.values(), (0, 1, -1), (False, True)))

    def places(*given: Tensor) -> list[Tensor]:
        return [op(x, dim, keepdim) for x in given for op, dim, keepdim in wanted]

    args = []
    for shape in ((6, 37), (5, 4, 33), (6, 70, 8)):
        x = (torch.randn(shape) * 4).round().clamp(-5, 5)  # with many equal ones
        args.append((x.abs() if dtype == "uint8" else x).to(getattr(torch, dtype)))
    found = ours(places, *args)
    assert isinstance(found, list)
    for mine, theirs in zip(found, places(*args), strict=True):
        assert mine.dtype == torch.int64 and torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ARG_EXTREMES)
def test_special_values_and_ties(name: str) -> None:
    """All orders of special and equal values. The first NaN wins; zeros are equal."""
    numbers = [0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, INF, -INF, NAN]
    rows = torch.tensor(list(itertools.permutations(numbers, 4)))
    rows = torch.cat([rows, torch.tensor([[-INF] * 4, [INF] * 4, [NAN] * 4, [-0.0, 0, 0, -0.0]])])
    assert torch.equal(ours(lambda x: ARG_EXTREMES[name](x, 1), rows), ARG_EXTREMES[name](rows, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARG_EXTREMES)
def test_largest_and_smallest_integers(name: str) -> None:
    ends = [2**31 - 1, 2**31 - 2, -(2**31), 1 - 2**31, 0, -1]
    rows = torch.tensor(list(itertools.permutations(ends, 3)), dtype=torch.int32)
    assert torch.equal(ours(lambda x: ARG_EXTREMES[name](x, 1), rows), ARG_EXTREMES[name](rows, 1))  # type: ignore[arg-type]


def test_values_and_indices() -> None:
    """Both, with the gradient of the values, which goes to the first of equal ones."""
    torch.manual_seed(5)
    wanted = list(itertools.product((torch.max, torch.min), (0, 1, 2), (False, True)))

    def both(x: Tensor) -> list[Tensor]:
        return [each for op, dim, keepdim in wanted for each in op(x, dim, keepdim=keepdim)]

    x = torch.randn(4, 19, 6).round()
    results: list[list[Tensor]] = []
    for model in (Lambda(both), fusewright.optimize(Lambda(both), (x.clone().requires_grad_(),))):
        leaf = x.clone().requires_grad_()
        found = model(leaf)
        weights = [torch.linspace(at, at + 1, v.numel()) for at, v in enumerate(found[::2])]
        sum(
            ((v * w.view(v.shape)).sum() for v, w in zip(found[::2], weights, strict=True))
        ).backward()
        assert leaf.grad is not None
        results.append([*(each.detach() for each in found), leaf.grad])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    left = pytorch_operators(
        Lambda(both), x.requires_grad_()
    )  # along columns the gradient is PyTorch's
    assert left == ["aten.value_selecting_reduction_backward.default"] * 8


def test_the_values_alone_train_without_calls() -> None:
    x = torch.randn(8, 33, requires_grad=True)
    assert not pytorch_operators(Lambda(lambda x: torch.max(x * 2, 1)[0].relu()), x)


def test_indices_along_a_batch_that_changes() -> None:
    """Along the batch itself, whose size may change."""
    model = fusewright.optimize(Lambda(lambda x: x.argmax(0)), (torch.randn(5, 9),))
    for many in (5, 1, 300):
        x = torch.randn(many, 9).round()
        assert torch.equal(model(x), x.argmax(0))


@pytest.mark.parametrize("loops", [False, True])
def test_gradients_of_another_batch(monkeypatch: pytest.MonkeyPatch, loops: bool) -> None:
    monkeypatch.setattr(scatters, "LOOPS", ("cpu",) if loops else ())
    model = Lambda(lambda x: x.max(1)[0] + x.min(2)[0].sum(1, keepdim=True))
    optimized = fusewright.optimize(model, (torch.randn(3, 5, 7, requires_grad=True),))
    for many in (3, 1, 20):
        x = torch.randn(many, 5, 7, requires_grad=True)
        mine, theirs = (torch.autograd.grad(m(x).square().sum(), x) for m in (optimized, model))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x.argmax(1), torch.randn(3, 5, dtype=torch.float64)),
        (lambda x: x.argmax(1), torch.randint(9, (3, 5))),
        (lambda x: x.argmax(), torch.randn(3, 5)),
    ],
)
def test_which_operators_stay_pytorchs(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert set(pytorch_operators(Lambda(function), x)) == {"aten.argmax.default"}
    assert torch.equal(fusewright.optimize(Lambda(function), (x,))(x), function(x))


def test_a_scatter_by_any_index_stays_pytorchs() -> None:
    """An index may be out of range, and PyTorch reports that."""
    model = Lambda(lambda x, i, s: x.scatter(1, i, s))
    args = (torch.randn(3, 5), torch.randint(5, (3, 1)), torch.randn(3, 1))
    assert "aten.scatter.src" in pytorch_operators(model, *args)


def test_pairs_on_the_host_stay_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extremes, "PAIRS_ON", ("cuda",))
    assert set(pytorch_operators(Lambda(lambda x: tuple(torch.max(x, 1))), torch.randn(3, 5))) == {
        "aten.max.dim"
    }


def test_a_tensor_without_dimensions() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    fusewright.optimize(Lambda(lambda x: x.max(0)[0] * 2), (x,))(x).backward()
    assert x.grad == 2


def test_an_index_beyond_the_tensor_is_an_error() -> None:
    model = Lambda(lambda x, y, s: y.scatter(1, x.max(1, keepdim=True)[1], s))
    x, y, s = torch.randn(6, 9), torch.randn(6, 6), torch.randn(6, 1)
    x[:, 3] = 9.0
    optimized = fusewright.optimize(model, (x, y, s))
    assert torch.equal(optimized(x, y, s), model(x, y, s))
    x[4, 8] = 10.0
    with pytest.raises(RuntimeError, match="out of bounds"):
        optimized(x, y, s)
