"""Tensors that forward makes from numbers are constants or index expressions in a kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.ir.graph import Node, Program
from fusewright.plan.steps import Plan
from fusewright.problem.load import load_problem
from fusewright.rewrite import rewrite
from fusewright.rewrite.numbers import folded, held, in_kind
from fusewright.target.target import Target
from tests.support.models import Lambda
from tests.support.on_gpu import on_gpu
from tests.support.plan_content import Plans, planned, structure
from tests.support.plans import called_operators
from tests.support.tensors import default_dtype

X = torch.linspace(-3, 3, 7 * 24).view(7, 24)


def gpu_plans(model: nn.Module, *args: Tensor, stay: tuple[str, ...] = ()) -> Plans:
    return planned(on_gpu(capture(model, args, mode="train"), stay), Target.cuda())[1]


def only_loops(plan: Plan) -> bool:
    return set(structure(plan)) == {"loop"}


def made_from_numbers(x: Tensor) -> Tensor:
    y = torch.min(x, torch.tensor(0.5)) * torch.tensor(2.0).exp()
    y = y + torch.linspace(0, 1, 24, device=x.device) + torch.arange(0.5, 12.5, 0.5)
    y = torch.where(torch.ones(24, 24).tril()[3].bool(), y, torch.tensor(-1.0))
    return y * torch.tensor([1.5] * 24) + torch.eye(24)[2] - torch.tensor(3)


def test_numbers_of_the_cpu_do_not_split_a_kernel_on_a_gpu() -> None:
    plans = gpu_plans(Lambda(made_from_numbers), X)
    for plan in plans.values():
        assert only_loops(plan) and structure(plan)["loop"] == 1


def test_a_reference_problem_as_it_is_known_needs_no_call(examples: tuple[Any, ...]) -> None:
    (path,) = (each for each in examples if each.stem == "conv2d_min_add_multiply")
    make = type(load_problem(path).make_model())
    model = make(64, 128, 3, 0.5, (128, 1, 1), 2.0)
    plans = gpu_plans(model, torch.empty(128, 64, 128, 128))
    assert structure(plans["inference"]) == {"convolution": 1}
    assert called_operators(*plans.values()) == []


class Scalars(nn.Module):
    """Numbers that stay on the CPU: an attribute, a buffer and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(2.0, dtype=torch.float64)
        self.register_buffer("shift", torch.tensor(3))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.factor + self.shift) * self.gain.exp() + self.factor


def test_a_number_that_is_an_input_is_copied_once_and_splits_nothing() -> None:
    plans = gpu_plans(Scalars(), X, stay=("factor", "shift", "gain"))
    for part in ("inference", "forward"):
        assert structure(plans[part]) == {"loop": 1, "aten._to_copy.default": 3}
    for call in (step for step in plans["inference"].steps if step.kind == "call"):
        assert ("non_blocking", True) in call.node.kwargs


def test_numbers_that_are_inputs_are_promoted_as_in_eager_mode() -> None:
    model = Scalars()
    fast = fusewright.optimize(model, (X,), modes=("train",))
    assert fast(X).dtype == model(X).dtype == torch.float32
    torch.testing.assert_close(fast(X), model(X))


def program_of(run: Any, x: Tensor = X) -> Program:
    return rewrite(on_gpu(capture(Lambda(run), (x,), mode="train")))


def test_an_output_on_the_cpu_stays_there() -> None:
    inference = program_of(lambda x: (x * torch.tensor(0.5), torch.tensor(0.5) * 3)).inference
    specs = inference.specs()
    devices = [specs[name].device for name in inference.outputs]  # type: ignore[index, union-attr]
    assert devices == ["cuda", "cpu"]


def test_a_call_reads_the_original() -> None:
    """PyTorch's operators get what the model gave them."""
    run = lambda x: torch.searchsorted(torch.arange(4.0), x) + torch.tensor(1)  # noqa: E731
    (call,) = (node for node in program_of(run).inference.nodes if "searchsorted" in node.op)
    assert isinstance(call, Node) and "arange" in call.refs()[0]


def test_a_list_of_numbers_is_read_from_memory_by_the_same_kernel() -> None:
    channels = lambda x: (x - torch.tensor([0.1, 0.4, 0.2])[:, None]) * 2  # noqa: E731
    plan = gpu_plans(Lambda(channels), torch.randn(4, 3, 24))["inference"]
    assert structure(plan) == {"loop": 1, "literal": 1}


def many_dtypes(x: Tensor) -> tuple[Tensor, ...]:
    whole, half, wide = x.to(torch.int32), x.half(), x.double()
    tenth = torch.tensor(0.1)
    return (
        (whole * 2) * tenth,
        whole + torch.tensor(7, dtype=torch.int8),
        whole > torch.tensor(0.5, dtype=torch.float64),
        half * torch.tensor(3.0),
        wide * tenth,  # the float32 nearest to 0.1, in double
        x * torch.tensor(0.1, dtype=torch.float64),
        x + torch.tensor(True),
        torch.where(x > 0, tenth, torch.tensor(2)),
        x * torch.tensor([-0.0] * 24),
        x + torch.tensor([0.485, 0.456, 0.406] * 8),
        torch.tensor([[1, 2], [3, 4]], device=x.device) * 2.5,
    )


def counted(x: Tensor) -> tuple[Tensor, ...]:
    columns, rows = x.shape[1], x.shape[0]
    return (
        x * torch.arange(columns),
        x * torch.arange(0.25, 0.25 + 0.1 * columns, 0.1)[:columns],
        x * torch.arange(columns, 0, -1),
        x + torch.linspace(-1, 1, columns),
        x + torch.linspace(0, 1, 24, dtype=torch.float64),
        x.T * torch.arange(rows),
        x + torch.eye(24)[:7],
        x @ torch.eye(24, 5, dtype=x.dtype),
        x * torch.ones(7, 24).triu(2),
        x + torch.tensor([0, 1, 2, 3, 4, 5] * 4),
        x + torch.tensor(list(range(48, 0, -2))),
        x.long() + torch.linspace(0, 46, 24).long(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("run", [many_dtypes, counted])
def test_kernels_compute_what_eager_mode_does(run: Any, dtype: torch.dtype) -> None:
    with default_dtype(dtype):
        fast = fusewright.optimize(Lambda(run), (X,), modes=("eval",)).eval()
        with torch.no_grad():
            for mine, theirs in zip(fast(X), run(X), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
                assert torch.equal(mine.signbit(), theirs.signbit())


def test_counting_is_as_exact_as_eager_mode() -> None:
    """a + s · i is computed in double and rounded once."""
    count = 4001
    runs = (
        lambda x: x + torch.arange(0.1, 0.1 + 0.3 * (count - 0.5), 0.3),
        lambda x: x + torch.linspace(-0.7, 1.3, count),
    )
    zeros = torch.zeros(2, count)
    exact = [
        [0.1 + 0.3 * i for i in range(count)],
        [-0.7 + 2.0 / (count - 1) * i for i in range(count)],
    ]
    for run, numbers in zip(runs, exact, strict=True):
        fast = fusewright.optimize(Lambda(run), (zeros,), modes=("eval",)).eval()
        truth = torch.tensor(numbers, dtype=torch.float64)
        error, eager = (
            (each[0].double() - truth).abs().max() for each in (fast(zeros), run(zeros))
        )
        assert error <= eager


class Gradients(nn.Module):
    """Constants between a parameter and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 2.0, 24))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.max(x * self.w, torch.tensor(0.0)) ** torch.tensor(2.0)
        y = y / (torch.tensor(1.5) + torch.arange(24).float())
        return F.relu(y - torch.full_like(y, 0.01)) * torch.tensor(math.pi)


def test_gradients_go_through_constants() -> None:
    model = Gradients()
    fast = fusewright.optimize(model, (X,), modes=("train",))
    grads = [
        torch.autograd.grad(each(x := X.clone().requires_grad_()).sum(), [x, *each.parameters()])
        for each in (fast, model)
    ]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_numbers_are_rounded_as_their_dtype_rounds() -> None:
    assert held(0.1, "float32") == 0.10000000149011612
    assert held(300, "uint8") is None and held(-1, "uint8") is None and held(2.7, "int32") == 2
    assert held(70000.0, "float16") == math.inf and held(1 / 3, "bfloat16") == 0.333984375
    assert folded("add", (0.1, 0.2), "float32", "float32") == 0.30000001192092896
    assert folded("div", (1.0, 0.0), "float32", "float32") is None
    assert folded("mul", (2**62, 4), "int64", "int64") is None
    assert folded("exp", (1.0,), "float32", "float32") is None
    assert folded("lt", (1, 2), "int64", "bool") is True
    assert folded("cast", (0.1,), "float32", "float64") == 0.10000000149011612
    for value in (0.1, 1e-5, math.pi, 1 / 3, 16777217.0, 1e-45, 3.4e38, 2.0, 1e300):
        assert held(in_kind(value, "float32"), "float32") == held(value, "float32")
    assert in_kind(9.999999747378752e-06, "float32") == in_kind(1e-5, "float32") == 1e-5
    assert repr(in_kind(-0.0, "float32")) == "-0.0" and repr(in_kind(0, "float32")) == "0.0"
    assert repr(in_kind(2.0, "int32")) == "2" and in_kind(2.5, "int32") == 2.5
