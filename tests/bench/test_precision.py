"""Precision classes: by which measured limits a result is fp32, tf32, bf16 or wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.bench.passes import is_doubtful
from fusewright.bench.record import Result, ValueCheck
from fusewright.verify.classes import coarsest
from fusewright.verify.compare import Check, Values, compare
from fusewright.verify.precision import RoundOperands, rounded

TRUTH = torch.randn(400, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def off(size: float, seed: int) -> Tensor:
    """The truth with a relative error of this size, spread evenly."""
    noise = torch.randn(
        TRUTH.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return TRUTH + size * noise * TRUTH.std()


def classified(mine: object, strict: float, tf32: float, bf16: float) -> Check:
    eager = off(strict, 1).float()
    narrow = {"tf32": off(tf32, 2), "bf16": off(bf16, 4)}
    return compare("output", Values(mine, eager, TRUTH, 1.0, eager, narrow))


@pytest.mark.parametrize(
    ("error", "limits", "precision"),
    [
        (2e-7, (2e-7, 3e-4, 2.4e-3), "fp32"),
        (1.2e-6, (2e-7, 3e-4, 2.4e-3), "fp32"),  # Winograd, or another order of summation.
        (2e-5, (2e-7, 3e-4, 2.4e-3), "tf32"),
        (6e-4, (2e-7, 3e-4, 2.4e-3), "tf32"),
        (3e-3, (2e-7, 3e-4, 2.4e-3), "bf16"),
        (2e-2, (2e-7, 3e-4, 2.4e-3), ""),
        # A long sum that no product goes into: narrow products leave it exact.
        (3e-6, (1e-6, 0.0, 0.0), "fp32"),
        (3e-5, (1e-6, 0.0, 0.0), ""),
        # The model lowers its own precision: nothing in it is fp32.
        (3e-4, (3e-4, 3e-4, 2.4e-3), "tf32"),
    ],
)
def test_classes(error: float, limits: tuple[float, float, float], precision: str) -> None:
    check = classified(off(error, 5).float(), *limits)
    assert check.precision == precision, check
    assert check.error == pytest.approx(error, rel=0.3)


def test_one_element_far_off_is_no_rounding() -> None:
    values = off(2e-7, 5).float()
    values[7, 3] += 0.05
    check = classified(values, 2e-7, 3e-4, 2.4e-3)
    assert check.precision == "" and check.error < 6e-4 and check.largest > 0.04 and not check.ok


@pytest.mark.parametrize("mine", [None, torch.zeros(400, 50), TRUTH.float()[:5], TRUTH])
def test_what_is_no_such_result_is_wrong(mine: Tensor | None) -> None:
    check = classified(mine, 2e-7, 3e-4, 2.4e-3)
    assert not check.ok and check.precision == ""
    assert coarsest(["fp32", check.precision]) == ""


def test_rounding_keeps_so_many_digits() -> None:
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11 * 1.01, -3.14159, torch.inf, 0.0]).double()
    assert rounded(values, 11).tolist()[:3] == [1.0, 1 + 2**-10, 1 + 2**-10]
    assert rounded(values, 11)[3].item() == -3.140625 and rounded(values, 11)[4].isinf()
    assert torch.equal(rounded(values, 8)[:4].float(), values[:4].bfloat16().float())
    left, right = TRUTH[:20, :30].clone().requires_grad_(), TRUTH[30:60, :].clone()
    with RoundOperands(8):
        product = left @ right
        (gradient,) = torch.autograd.grad(product.sum(), left)
    exact = rounded(left.detach(), 8) @ rounded(right, 8)
    assert torch.allclose(product, exact) and not torch.allclose(product, left @ right, rtol=1e-6)
    assert torch.allclose(gradient, torch.ones(20, 50).double() @ rounded(right, 8).t())


def test_gradients_coarser_than_outputs_are_in_doubt() -> None:
    def check(name: str, precision: str) -> ValueCheck:
        return ValueCheck("before", name, 0, 0, 0, {}, precision, bool(precision))

    def found(output: str, gradient: str) -> Result:
        checks = (check("output", output), check("grad x0", gradient))
        precision = coarsest([each.precision for each in checks])
        return Result("a", "timed", precision=precision, checks=checks)

    def doubtful(output: str, gradient: str) -> bool:
        result = found(output, gradient)
        return is_doubtful(result, result)

    assert doubtful("fp32", "tf32")
    assert not doubtful("fp32", "fp32")
    assert not doubtful("tf32", "tf32")
    assert not doubtful("fp32", "")
    assert is_doubtful(found("tf32", "tf32"), found("fp32", "fp32"))
