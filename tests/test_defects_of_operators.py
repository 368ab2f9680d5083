"""Operators that once had other results, or none, beside eager PyTorch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusewright
from fusewright.compile.backend import backend
from fusewright.compile.solution import solve
from fusewright.errors import CaptureError
from tests.support.models import Lambda

NUMBER_REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "amax": lambda x: torch.amax(x, 0),
    "amin": lambda x: torch.amin(x, -1),
    "aminmax": lambda x: torch.aminmax(x, dim=0).max,
    "vector_norm": lambda x: torch.linalg.vector_norm(x, math.inf, dim=0),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "flip": lambda x: (x * 2).flip(0) * 3,
    "flip from the end": lambda x: (x * 2).flip(-1) * 3,
    "a running sum from the end": lambda x: (x * 2).flip(0).cumsum(0).flip(0) * 3,
}


@pytest.mark.parametrize("name", NUMBER_REDUCTIONS)
def test_reductions_of_a_number(name: str) -> None:
    """A tensor without dimensions may be reduced along dimension 0 or -1, or turned around."""
    x = torch.tensor(1.5, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fast = fusewright.optimize(Lambda(NUMBER_REDUCTIONS[name]), (x,))
        found = fast(x)
    expected = NUMBER_REDUCTIONS[name](x)
    assert found.shape == expected.shape and torch.equal(found, expected)
    gradients = [torch.autograd.grad(each, x)[0] for each in (found, expected)]
    assert torch.equal(*gradients)


def _ctc(scores: Tensor) -> Tensor:
    return F.ctc_loss(scores, torch.ones(2, 3, dtype=torch.int64), (6, 6), (3, 2))


UNKNOWN_SHAPES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "aten._ctc_loss": (_ctc, torch.randn(6, 2, 5).log_softmax(-1)),
    "aten.linalg_lstsq": (lambda a: torch.linalg.lstsq(a, a).solution, torch.randn(5, 3)),
}


@pytest.mark.parametrize("name", UNKNOWN_SHAPES)
def test_unknown_shapes_run_and_are_explained_in_words(name: str) -> None:
    function, x = UNKNOWN_SHAPES[name]
    torch._dynamo.reset()
    fast = fusewright.optimize(Lambda(function), (x,))
    torch.testing.assert_close(fast(x), function(x))
    with pytest.raises(CaptureError, match=f"the shapes that {name}.* returns depend on") as raised:
        solve(Lambda(function), (x,))
    assert "move it out of the model" in str(raised.value)
    assert "Exception" not in str(raised.value)
    assert f"the shapes that {name}" in fusewright.explain(fast).torch_compile


SLICES = {
    "step": slice(-10, -2, 2),
    "open": slice(-10, None, 3),
    "no step": slice(-10, -2),
    "beyond": slice(-30, -2, 2),
    "from the beginning": slice(3, -2, 2),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_that_count_from_the_end_of_a_dynamic_dimension(name: str) -> None:
    """A negative start with a step was once read as an index before the first element."""

    def function(x: Tensor) -> Tensor:
        return (x * 2)[SLICES[name]] * 1.25

    fast = fusewright.optimize(Lambda(function), (torch.randn(20, 3),))
    for rows in (20, 27):
        x = torch.randn(rows, 3, requires_grad=True)
        found, expected = fast(x), function(x)
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected)]
        assert torch.equal(*gradients)


OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "unfold": lambda x: (x * 2).unfold(0, 3, 1),
    "as_strided": lambda x: (x * 2).as_strided((2, 2), (1, 1)),
    "expand": lambda x: (x * 2).expand(3, *x.shape),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_gradients_of_results_that_overlap_in_memory(name: str) -> None:
    """An incoming gradient is not brought into the memory of such a result."""
    function = OVERLAPPING[name]
    x = torch.randn(5, 2, requires_grad=True)
    fast = fusewright.optimize(Lambda(function), (x,))
    # PyTorch's own back-ends give another gradient here.
    compiled = torch.compile(function, backend=backend)
    tangent = torch.arange(float(function(x).numel())).view(function(x).shape)
    (expected,) = torch.autograd.grad(function(x), x, tangent)
    for each in (fast, compiled):
        assert torch.equal(torch.autograd.grad(each(x), x, tangent)[0], expected)


@pytest.mark.parametrize("shape", [(), (1, 3), (2, 1)])
def test_any_and_all_of_uint8_are_0_or_1(shape: tuple[int, ...]) -> None:
    """Over a dimension of size one they once were a copy."""

    def function(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [y.any(), y.all(), y.any(0), y.all(-1)]

    x = torch.full(shape, 7, dtype=torch.uint8)
    fast = fusewright.optimize(Lambda(function), (x,))
    for found, expected in zip(fast(x), function(x), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_labels_behind_the_end_of_a_list_do_not_count() -> None:
    """The first -1 ends a list of labels. PyTorch's decomposition counts what stands behind it."""

    def function(x: Tensor, labels: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x * 2, labels)

    labels = torch.tensor([[1, 3, -1, 0, 0], [-1, 2, 2, 2, 2], [4, 3, 2, 1, 0]])
    fast = fusewright.optimize(Lambda(function), (torch.randn(3, 5), labels))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    for rows in (labels, labels[:2]):
        x = torch.randn(rows.shape[0], 5, requires_grad=True)
        expected = function(x, rows)
        gradient = torch.autograd.grad(expected.sum(), x)[0]
        for each in (fast, compiled):
            torch.testing.assert_close(each(x, rows), expected)
            torch.testing.assert_close(torch.autograd.grad(each(x, rows).sum(), x)[0], gradient)
            with torch.no_grad():
                torch.testing.assert_close(each(x, rows), expected.detach())
    assert "float32[s0, 5]" in str(fast.explain())  # one program for both batches


def test_an_assertion_without_a_message_stays() -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all())
        return x * 2

    fast = fusewright.optimize(Lambda(function), (torch.ones(3, 4),))
    torch._dynamo.reset()
    for each in (fast, torch.compile(function, backend=backend)):
        assert torch.equal(each(torch.ones(2, 4)), torch.full((2, 4), 2.0))
        with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
            each(-torch.ones(2, 4))


DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "a number %": lambda x, y: 7 % y,
    "fmod": torch.fmod,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_integers_divided_by_zero_are_an_error_on_a_cpu(name: str) -> None:
    """Our loops once gave a number."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return DIVISIONS[name](x * 2, y) * 3

    x, y = torch.arange(-6, 6).view(3, 4), torch.tensor([1, -2, 3, -4])
    fast = fusewright.optimize(Lambda(function), (x, y))
    assert torch.equal(fast(x, y), function(x, y))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fast(x, torch.tensor([1, 0, 2, 3]))
    assert "a divisor of zero is an error on a CPU" in str(fast.explain())


@pytest.mark.parametrize("name", ["//", "%", "fmod", "trunc"])
def test_an_argument_that_is_zero_is_an_error_too(name: str) -> None:
    def function(x: Tensor, y: int) -> Tensor:
        return DIVISIONS[name](x * 2, y) * 3  # type: ignore[arg-type]

    x = torch.arange(1, 13).view(3, 4)
    fast = fusewright.optimize(Lambda(function), (x, 3))
    for number in (3, 5, -2):
        assert torch.equal(fast(x, number), function(x, number))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fast(x, 0)


def test_loops_divide_integers_by_numbers_that_are_known() -> None:
    def function(x: Tensor) -> Tensor:
        return x // 4 + x % torch.full((), 3)

    x = torch.arange(-6, 6).view(3, 4)
    fast = fusewright.optimize(Lambda(function), (x,))
    assert torch.equal(fast(x), function(x))
    ours = [each for each in fast.explain().graphs if not each.by_dynamo]
    assert ours and not any(each.calls for each in ours)


def test_probabilities_out_of_range_are_an_error_on_a_cpu() -> None:
    """Our loop once gave the loss of a number that is no probability."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, y, weight=y + 1) * 2

    x, y = torch.rand(3, 4, requires_grad=True), torch.rand(3, 4)
    torch._dynamo.reset()
    for each in (
        fusewright.optimize(Lambda(function), (x, y)),
        torch.compile(function, backend=backend),
    ):
        for rows in (3, 0):
            found, expected = each(x[:rows], y[:rows]), function(x[:rows], y[:rows])
            torch.testing.assert_close(found, expected, equal_nan=True)
            pair = (torch.autograd.grad(loss, x)[0] for loss in (found, expected))
            torch.testing.assert_close(*pair)
        for wrong in (1.5, -0.5, math.nan):
            with pytest.raises(RuntimeError, match="all elements of input should be between 0"):
                each(torch.full_like(x, wrong), y)
            with torch.no_grad(), pytest.raises(RuntimeError, match="of target should be between"):
                each(x, torch.full_like(y, wrong))
