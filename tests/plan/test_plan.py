"""Planning: what is fused with what, on models whose best plan is known."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import optimize
from fusewright.capture import capture
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Reduce
from fusewright.plan import plan
from fusewright.plan.frames import (
    DimIndex,
    NeedSplitError,
    NotFusibleError,
    dense_strides,
    group,
)
from fusewright.plan.steps import Call
from fusewright.rewrite import rewrite
from fusewright.target.target import Target
from tests.support.models import ParametricLambda
from tests.support.plans import host_plans, loops_and_calls, steps_of


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.softmax(x, -1),
        lambda m, x: F.log_softmax(x, -1),
        lambda m, x: F.layer_norm(x, x.shape[-1:]),
        lambda m, x: F.normalize(x, dim=-1),
        lambda m, x: torch.logsumexp(x, -1),
        lambda m, x: F.gelu(x) * F.silu(x) + x.abs(),
        lambda m, x: (x - x.amin(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3),
    ],
)
def test_a_row_is_one_kernel(function) -> None:  # type: ignore[no-untyped-def]
    inference, forward, backward = host_plans(function, torch.randn(64, 256))
    assert loops_and_calls(inference) == ["loop"] and loops_and_calls(forward) == ["loop"]
    assert loops_and_calls(backward) == ["loop"]


def test_group_norm_is_one_kernel_and_its_gradient_reads_the_input_twice() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        return F.group_norm(x.reshape(x.shape[0], 8, -1), 4)

    inference, forward, backward = host_plans(model, torch.randn(64, 256))
    assert loops_and_calls(inference) == ["loop"] and loops_and_calls(forward) == ["loop"]
    big = [loop for loop in steps_of(backward, "loop") if loop.bytes_moved > 64 * 256 * 4]
    assert len(big) == 2


def test_softmax_reads_and_writes_each_element_once() -> None:
    inference, _, _ = host_plans(lambda m, x: F.softmax(x, -1), torch.randn(64, 256))
    assert inference.steps[0].bytes_moved == 2 * 64 * 256 * 4


def test_a_bias_gradient_shares_the_pass_that_makes_its_operand() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, m.weight) + m.bias)

    _, _, backward = host_plans(
        model, torch.randn(32, 48), weight=torch.randn(64, 48), bias=torch.randn(64)
    )
    assert loops_and_calls(backward) == ["loop", "call", "call"]
    (loop,) = steps_of(backward, "loop")
    assert len(loop.outputs) == 2 and loop.kernel.inner


def test_a_scalar_parameters_gradient_shares_the_pass_of_the_bias() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        return torch.min(F.linear(x, m.weight, m.bias), m.limit) - m.limit

    _, _, backward = host_plans(
        model,
        torch.randn(32, 48),
        weight=torch.randn(64, 48),
        bias=torch.randn(64),
        limit=torch.tensor(0.5),
    )
    big = [loop for loop in steps_of(backward, "loop") if loop.bytes_moved > 32 * 64 * 4]
    assert len(big) == 1, "one pass over the activations"


def test_batch_norm_statistics_are_finished_in_the_kernel_that_gathers_them() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, m.weight, m.bias, training=True)

    inference, _, _ = host_plans(
        model, torch.randn(256, 64), weight=torch.randn(64), bias=torch.randn(64)
    )
    assert loops_and_calls(inference) == ["loop", "loop"]
    first, second = steps_of(inference, "loop")
    assert "rsqrt" in first.operators and "rsqrt" not in second.operators


def test_a_matmul_stays_a_visible_call_with_its_reason() -> None:
    inference, _, _ = host_plans(
        lambda m, x: x @ m.weight, torch.randn(4, 8), weight=torch.randn(8, 8)
    )
    (call,) = inference.steps
    assert isinstance(call, Call) and "matmul" in call.reason and call.operations == 2 * 4 * 8 * 8


def test_the_bias_of_a_linear_layer_moves_into_the_loop_that_follows() -> None:
    inference, _, _ = host_plans(
        lambda m, x: torch.tanh(F.linear(x, m.weight, m.bias)),
        torch.randn(4, 8),
        weight=torch.randn(8, 8),
        bias=torch.randn(8),
    )
    assert [step.node.op for step in inference.steps if isinstance(step, Call)] == [
        "aten.mm.default"
    ]
    assert steps_of(inference, "loop")[0].operators == ("add", "tanh")


def test_a_reshape_that_no_index_can_follow_costs_a_view_not_an_error() -> None:
    inference, _, _ = host_plans(
        lambda m, x: torch.relu(torch.relu(x).reshape(8, 3)), torch.randn(4, 6)
    )
    assert loops_and_calls(inference) in (["loop", "loop"], ["loop"])


def test_several_outputs_of_one_pass() -> None:
    inference, _, _ = host_plans(
        lambda m, x: (x.exp(), x.exp() + x, x.sum(-1)), torch.randn(16, 32)
    )
    assert (
        loops_and_calls(inference) == ["loop"] and len(steps_of(inference, "loop")[0].outputs) == 3
    )


# Index arithmetic -----------------------------------------------------------------------------


def test_axes_are_assigned_to_dimensions() -> None:
    sizes = (Dim(1, ("s0",)), Dim(4), Dim(6))
    index = group((Dim(4, ("s0",)), Dim(6)), (0, 1, 2), sizes)
    assert index == (DimIndex((0, 1)), DimIndex((2,)))


def test_a_dimension_inside_an_axis_asks_for_a_split() -> None:
    with pytest.raises(NeedSplitError) as need:
        group((Dim(4), Dim(6)), (0,), (Dim(24),))
    assert need.value.position == 0 and need.value.inner == Dim(6)


def test_sizes_without_a_common_split_do_not_fuse() -> None:
    with pytest.raises(NotFusibleError, match="no common split"):
        group((Dim(6), Dim(4)), (0, 1), (Dim(8), Dim(3)))


def test_only_dense_layouts_are_kept() -> None:
    shape = (Dim(2), Dim(3), Dim(4))
    channels_last = (Dim(12), Dim(1), Dim(3))
    assert dense_strides(shape, channels_last) == channels_last
    assert dense_strides(shape, (Dim(12), Dim(4), Dim(0))) == (Dim(12), Dim(4), Dim(1))
    assert dense_strides(shape, (Dim(24), Dim(8), Dim(2))) == (Dim(12), Dim(4), Dim(1))


def test_equal_sums_are_computed_once() -> None:
    """A scalar's gradient begins with the sum that is a vector's gradient."""
    _, _, backward = host_plans(
        lambda m, x: torch.sigmoid(x + m.row + m.one),
        torch.randn(64, 4096),
        row=torch.randn(4096),
        one=torch.randn(1),
    )
    sums = [
        [item for item in step.kernel.body if isinstance(item, Reduce)]
        for step in backward.kernels
        if any(isinstance(item, Reduce) for item in step.kernel.body)
    ]
    assert [len(each) for each in sums] == [1, 1], backward


def test_loops_are_fused_if_they_read_a_tensor_in_one_order() -> None:
    """A transposed copy of a tensor and its sum along rows read it in different orders."""

    def in_order(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).sum(-1), x * 3

    def turned(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).sum(-1), (x.transpose(1, 2) * 3).contiguous()

    x = torch.randn(16, 64, 96)
    assert loops_and_calls(host_plans(in_order, x, mode="eval")[0]) == ["loop"]
    assert loops_and_calls(host_plans(turned, x, mode="eval")[0]) == ["loop", "loop"]


def test_few_rows_that_clusters_hold_are_one_kernel() -> None:
    """A block cannot hold a row of 1.6 MB. Without clusters each sweep is a kernel of its own."""
    x = torch.zeros(64, 393_216)
    program = rewrite(capture(ParametricLambda(lambda m, x: F.softmax(x, -1)), (x,), mode="eval"))

    def loops(target: Target) -> list[str]:
        return loops_and_calls(plan(program.inference, program.example_sizes, target))

    assert loops(Target.cuda()) == ["loop"]
    assert loops(Target.cuda(tensor_cores=False)) == ["loop"] * 3


class Norms(nn.Module):
    """Three batch norms, each of which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.BatchNorm1d(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return result


def test_numbers_that_wait_for_nothing_share_a_launch() -> None:
    """The three counters are one kernel, and they count."""
    model, x = Norms(), torch.randn(20, 6)
    fast = optimize(copy.deepcopy(model), x, modes=("train",))
    program = rewrite(capture(model, (x,), mode="train"))
    made = plan(program.forward, program.example_sizes, Target.host())
    counters = [
        loop for loop in steps_of(made, "loop") if loop.kernel.arguments[-1].dtype == "int64"
    ]
    assert [len(loop.outputs) for loop in counters] == [3]
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))
    for mine, theirs in zip(fast.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [int(each.num_batches_tracked) for each in (fast.first, fast.third)] == [2, 2]


def test_small_sums_that_wait_for_one_kernel_share_a_launch() -> None:
    """Sums of parts that one loop wrote; not sums that read in different orders."""

    def model(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        a, b = x[:, :96].reshape(-1, 96).sum(0), x[:, 96:].reshape(-1, 96).amax(0)
        return a, b

    inference, _, _ = host_plans(model, torch.randn(40, 192))
    assert loops_and_calls(inference) == ["loop"]

    def crossed(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), y.t().amax(0)

    inference, _, _ = host_plans(crossed, torch.randn(48, 48), torch.randn(48, 48))
    assert loops_and_calls(inference) == ["loop", "loop"]
