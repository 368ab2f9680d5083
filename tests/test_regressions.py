"""Models that once gave wrong results or crashed, each as small as possible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from tests.support.models import Lambda
from tests.support.regressions import check

# Random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.rrelu(x, 0.1, 0.4, True) - F.rrelu(x, 0.1, 0.4, True),
        lambda x: x * (torch.poisson(x.detach().exp()) - torch.poisson(x.detach().exp())),
        lambda x: (F.gumbel_softmax(x), F.gumbel_softmax(x)),
        lambda x: x * torch.randn_like(x) - torch.randn_like(x),
    ],
)
def test_two_random_draws_differ(function: Callable[..., Any]) -> None:
    check(Lambda(function), torch.randn(4, 5))


def test_draws_come_in_the_models_order() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = x.exp()
        first = torch.rand_like(x).matmul(x.t())
        second = early + torch.rand_like(x)
        return early, second, first

    check(Lambda(model), torch.randn(5, 5))


# Results without aliases ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 1,),
        lambda x: ((x.t() / 1)[0],),
        lambda x: (x.view(4, 5, 1).sum(2),),
        lambda x: (x.view(4, 5, 1).mean(2), x.view(4, 5, 1).amax(2)),
        lambda x: (torch.any(x > 0, dim=()), torch.var_mean(x.view(4, 5, 1), 2, correction=0)[1]),
        lambda x: (lambda y: (y, y.clone(), y * 1, y.clone().t()))(x.exp()),
    ],
)
def test_results_share_no_memory(function: Callable[..., tuple[Tensor, ...]]) -> None:
    x = torch.randn(4, 5)
    results = fusewright.optimize(Lambda(function), x, modes=("train",))(x)
    for result, expected in zip(results, function(x), strict=True):
        torch.testing.assert_close(result, expected)
    held = [each.untyped_storage().data_ptr() for each in (x, *results)]
    assert len(set(held)) == len(held)


# Sizes ----------------------------------------------------------------------------------------


def test_no_dimensions_mean_none_for_any_and_all() -> None:
    check(Lambda(lambda x: (torch.any(x > 0, dim=()), torch.all(x > 0, dim=()))), torch.randn(4, 5))


def test_an_empty_tensor_that_is_expanded() -> None:
    check(Lambda(lambda x: x.view(0, 5, 1).expand(0, 5, 3)), torch.randn(0, 5))


def test_an_axis_may_be_split_many_times() -> None:
    def model(x: Tensor) -> Tensor:
        return x.view([2] * 18).permute(*reversed(range(18))).reshape(-1).exp()

    check(Lambda(model), torch.randn(2**18))


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.cat([x, x * 2]).exp(), lambda x: x[-3:].exp(), lambda x: x[:3].exp()],
)
def test_slices_that_move_with_the_batch(function: Callable[..., Tensor]) -> None:
    model = Lambda(function)
    fast = fusewright.optimize(model, torch.randn(4, 5), modes=("train",))
    for batch in (4, 7):
        x = torch.randn(batch, 5)
        given = [x.clone().requires_grad_() for _ in range(2)]
        ours, eager = fast(given[0]), model(given[1])
        torch.testing.assert_close(ours, eager)
        tangent = torch.randn_like(eager)
        ours.backward(tangent)
        eager.backward(tangent)
        torch.testing.assert_close(given[0].grad, given[1].grad)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_of_too_few_rows() -> None:
    model = Lambda(lambda x: (x.var(0), x.var(0, correction=2), x.std(0, correction=0)))
    fast = fusewright.optimize(model, torch.randn(4, 5), modes=("train",))
    for batch in (0, 1, 2):
        x = torch.randn(batch, 5)
        for mine, expected in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(mine, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_with_more_corrections_than_elements() -> None:
    model = Lambda(lambda x: (x.var(1, correction=7), x.std(1, correction=5)))
    fast = fusewright.optimize(model, torch.randn(4, 5), modes=("train",))
    for x in (torch.randn(4, 5), torch.ones(4, 5)):
        for mine, expected in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(mine, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*no kernels", "ignore:.*original forward")
def test_the_largest_of_nothing_is_refused_as_in_eager() -> None:
    fast = fusewright.optimize(Lambda(lambda x: x.amax(0)), torch.randn(4, 5))
    with pytest.raises(IndexError, match="non-zero size"):
        fast(torch.randn(0, 5))


def test_a_broadcast_parameter_and_its_gradient_run_at_batch_one() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.PReLU(5))
    program = capture(model, (torch.randn(4, 5),), mode="train")
    assert all(eval(guard, {}, {"s0": 1}) for guard in program.guards), program.guards
    fast = fusewright.optimize(model, torch.randn(4, 5), modes=("train",))
    x = torch.randn(1, 5)
    torch.testing.assert_close(fast(x), model(x))


# Shapes of graphs -----------------------------------------------------------------------------


def test_a_chain_of_three_hundred_operators() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(150):
            x = x * 1.01 + 0.01
        return x

    check(Lambda(model), torch.randn(4, 5))


def test_a_ladder_of_diamonds_after_a_reduction() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sum(0)
        for _ in range(24):
            y = y * 0.5 + y.abs() * 0.25
        return y, x.exp().matmul(y), x.amax(0) + y

    check(Lambda(model), torch.randn(4, 5))


def test_one_result_of_an_operator_in_several_outputs() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        values, _ = F.max_pool2d(x, 2, return_indices=True)
        return F.max_pool2d(x, 2).relu(), values, values * 2

    check(Lambda(model), torch.randn(2, 3, 4, 4))


# Values that are no tensors -------------------------------------------------------------------


def test_complex_numbers_among_the_operands() -> None:
    check(
        Lambda(lambda x: (x * (1 + 2j)).abs() + (x * torch.tensor([1 - 1j])).real),
        torch.randn(4, 5),
    )


def test_named_results_sizes_and_numbers_made_of_sizes() -> None:
    model = Lambda(lambda x: (torch.max(x, 1), x.shape, x.shape[0] / 2, x.shape[0] > 3))
    x = torch.randn(4, 5)
    best, shape, half, many = fusewright.optimize(model, x, modes=("train",))(x)
    assert isinstance(best, torch.return_types.max) and torch.equal(best.values, x.amax(1))
    assert isinstance(shape, torch.Size) and shape == x.shape and (half, many) == (2.0, True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_beside_half_precision_keep_their_digits(dtype: torch.dtype) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return x * 65520.0, x / 65520.0, x * 0.1, x.mean(), x.mean(1), x > 0.1, x.clamp(-0.1, 0.3)

    check(Lambda(model), (0.25 * torch.randn(3, 30_001)).to(dtype))


# Half precision and gradients -----------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_models_build_and_are_right(dtype: torch.dtype) -> None:
    layers = [nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.SiLU()]
    check(nn.Sequential(*layers).to(dtype), torch.randn(6, 16, dtype=dtype))
    check(Lambda(lambda x: x.float().sum(0).to(dtype)), torch.randn(6, 16, dtype=dtype))


def test_a_kept_value_with_a_range_test_is_read_back_without_it() -> None:
    """cos is costly and has a fast form for usual arguments: two sweeps share one computation."""

    def model(x: Tensor) -> Tensor:
        wave = torch.cos(x.abs() * 2)
        return wave / wave.std(-1, keepdim=True)

    check(Lambda(model), torch.randn(5, 40))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wide_half_precision_mean_is_not_taken_from_rounded_row_sums(dtype: torch.dtype) -> None:
    """Each row sums to 100,100, beyond float16 and between two bfloat16 numbers."""
    x = torch.full((4, 1001), 100.0, dtype=dtype)
    fast = fusewright.optimize(Lambda(lambda t: (t.mean(), t.mean(1))), x, modes=("eval",)).eval()
    with torch.no_grad():
        whole, rows = fast(x)
    assert whole.item() == 100.0 and rows.tolist() == [100.0] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_backward_finds_the_largest_of_what_it_computes_again(dtype: torch.dtype) -> None:
    """It starts from the stored row sum; forward used the sum before rounding."""
    matrix = torch.randn(64, 8).to(dtype)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.exp(x) * x.sum(-1, keepdim=True)
        return y @ matrix, y.amax(0)

    x = torch.randn(16, 64).to(dtype).requires_grad_()
    product, most = fusewright.optimize(Lambda(model), x, modes=("train",))(x)
    (gradient,) = torch.autograd.grad(product.float().sum() + most.float().sum(), x)
    assert gradient.isfinite().all()


def test_a_mean_beside_a_sum_that_exceeds_float16() -> None:
    x = torch.ones(3, 80_000, dtype=torch.float16)
    model = Lambda(lambda x: (x.sum(-1), x.mean(-1), x * x.mean(-1, keepdim=True)))
    total, mean, scaled = fusewright.optimize(model, x, modes=("eval",)).eval()(x)
    assert total.isinf().all() and bool((mean == 1).all()) and torch.equal(scaled, x)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * self.weight


def test_an_unused_parameter_makes_no_output_differentiable() -> None:
    model = WithUnused()
    fast = fusewright.optimize(model, torch.randn(5, 4), modes=("train",))
    for wanted in (False, True):
        x = torch.randn(5, 4, requires_grad=wanted)
        assert [y.requires_grad for y in fast(x)] == [y.requires_grad for y in model(x)]


@pytest.mark.filterwarnings("ignore:.*original forward.*", "ignore:no kernels.*")
def test_a_branch_on_the_rest_of_a_division_of_sizes() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if 24 % (2 * x.shape[0]) == 0 else x * 3

    model = Lambda(function).eval()
    fast = fusewright.optimize(copy.deepcopy(model), (torch.randn(4, 5),), modes=("eval",)).eval()
    for size in (4, 5, 6, 7, 12):
        x = torch.randn(size, 5)
        assert torch.equal(fast(x), model(x))
