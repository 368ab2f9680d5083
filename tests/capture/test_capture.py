"""Capture: labels, buffers, dynamic batch, and named errors that point at the user's line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.errors import CaptureError, ProblemError
from fusewright.ir.graph import Dim, Program
from fusewright.ir.interpret import interpret
from fusewright.rewrite import rewrite


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that the error must name
            return x + 1
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Structured(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor], index: Tensor, *, scale: float = 2.0) -> Any:
        left, right = pair
        total = left * scale + right
        return {"sum": total, "picked": total[:, 0] + index, "rows": left.shape[0], "none": None}


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.add_(1).mul_(x)
        return y.relu_()


class Halving(nn.Module):
    """The size of its result is no product of sizes, so it is captured with fixed sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:3]]) * 2


def bound(program: Program, model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        tensors[int(each.path)] if each.kind == "input" else held[each.path].detach()
        for each in program.bindings
    ]


def test_parameters_buffers_and_updates_are_labelled() -> None:
    program = capture(Normed(), (torch.randn(5, 6),), mode="train")
    kinds = {each.path: each.kind for each in program.bindings}
    assert kinds["linear.weight"] == "parameter" and kinds["bn.running_mean"] == "buffer"
    changed = {
        program.bindings[result.index].path
        for result in program.results
        if result.kind == "mutation"
    }
    assert changed == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    evaluated = capture(Normed(), (torch.randn(5, 6),), mode="eval")
    assert not [result for result in evaluated.results if result.kind == "mutation"]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_capture_leaves_the_model_as_it_was(mode: str) -> None:
    model = Normed().train(mode == "eval")
    before = copy.deepcopy(model.state_dict())
    capture(model, (torch.randn(5, 6),), mode=mode)
    assert model.training == (mode == "eval") and model.bn.training == (mode == "eval")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_first_dimension_is_dynamic_and_the_others_are_not() -> None:
    program = capture(Normed(), (torch.randn(5, 6),), mode="eval")
    (symbol,) = program.symbols
    assert symbol.example == 5 and symbol.dim == 0
    spec = next(each.spec for each in program.forward.inputs if each.name == "x")
    assert spec.shape == (Dim(1, (symbol.name,)), Dim(6))


def test_batch_norm_in_training_keeps_its_own_rule_on_the_batch() -> None:
    program = capture(Normed(), (torch.randn(5, 6),), mode="train")
    assert not all(eval(guard, {}, {"s0": 1}) for guard in program.guards)
    assert all(eval(guard, {}, {"s0": 7}) for guard in program.guards)


def test_a_plain_pointwise_model_runs_at_any_batch() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x) + 1

    program = capture(Plain(), (torch.randn(5, 6),), mode="eval")
    assert all(eval(guard, {}, {"s0": 1}) for guard in program.guards)


def test_the_gradients_of_a_shared_parameter_add_up() -> None:

    model, x = Tied(), torch.randn(3, 5)
    fast = fusewright.optimize(model, x, modes=("train",))
    assert fast.second.weight is fast.first.weight
    (ours,) = torch.autograd.grad(fast(x).sum(), [model.first.weight])
    (eager,) = torch.autograd.grad(model(x).sum(), [model.first.weight])
    torch.testing.assert_close(ours, eager)


def test_structures_constants_integers_and_keywords() -> None:
    model = Structured()
    args = ((torch.randn(4, 3), torch.randn(4, 3)), torch.arange(4))
    program = capture(model, args, {"scale": 3.0}, mode="eval")
    assert program.output_tree == "{'sum': o[0], 'picked': o[1], 'rows': o[2], 'none': None}"
    assert [each.differentiable for each in program.bindings] == [True, True, False]
    rows = program.inference.outputs[2]
    assert isinstance(rows, Dim) and rows.at({"s0": 9}) == 9


def test_in_place_operators_become_values() -> None:
    check_against_eager(InPlace(), (torch.randn(4, 3, dtype=torch.float64),))


def test_a_size_that_is_no_product_of_sizes_fixes_the_batch() -> None:
    program = capture(Halving(), (torch.randn(5, 2),), mode="eval")
    assert program.symbols == ()
    check_against_eager(Halving(), (torch.randn(5, 2, dtype=torch.float64),))


class Matmul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.prod()


def test_sizes_are_fixed_before_gradients_are_given_up() -> None:
    """Backward needs the number of elements minus one, which is no product of sizes."""
    program = capture(Matmul(), [torch.rand(4, 6) + 0.5], mode="train")
    assert program.backward is not None and not program.symbols


def test_a_models_own_error_is_raised() -> None:
    """It is not replaced by an error about gradients that nobody asked for."""

    class Targeted(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            loss = F.soft_margin_loss(x, target)
            return loss if loss > 0 else x.sum()

    with pytest.raises(CaptureError, match="control flow"):
        capture(Targeted(), [torch.randn(3, 4), torch.ones(3, 4)], mode="train")


def test_control_flow_on_values_names_file_and_line() -> None:
    lines, first = inspect.getsourcelines(Branching)
    line = first + next(n for n, text in enumerate(lines) if "must name" in text)
    with pytest.raises(CaptureError, match=rf"test_capture\.py:{line}: .*depends on the values"):
        capture(Branching(), (torch.randn(3),), mode="eval")


def test_an_unknown_output_type_is_refused_by_name() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {x}

    with pytest.raises(CaptureError, match="returns a set"):
        capture(Odd(), (torch.randn(3),), mode="eval")


def test_outputs_that_do_not_depend_on_an_input_reach_no_gradient_of_it() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * self.weight

    program = capture(Two(), (torch.randn(4, 3),), mode="train")
    names = [each.path for each in program.bindings]
    weight, x = names.index("weight"), names.index("0")
    assert set(program.reach[0]) == {x} and set(program.reach[1]) == {weight, x}


def check_against_eager(model: nn.Module, tensors: tuple[Tensor, ...]) -> None:
    """The captured and the rewritten graphs give eager's outputs and gradients in float64."""
    program = capture(model, tensors, mode="train")
    for each in (program, rewrite(program)):
        given = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        expected = model(*given)
        sizes = each.example_sizes
        results = interpret(each.forward, bound(each, model, tensors), sizes)
        torch.testing.assert_close(results[0], expected.detach())
        tangent = torch.randn_like(expected)
        assert each.backward is not None
        saved = [
            value
            for value, result in zip(results, each.results, strict=True)
            if result.kind == "saved"
        ]
        gradients = interpret(each.backward, [*saved, tangent], sizes)
        leaves = [*given, *model.parameters()]
        wanted = torch.autograd.grad(expected, leaves, tangent)
        order = [each_.kind for each_ in each.bindings]
        ours = [g for g, kind in zip(gradients, order, strict=True) if kind == "input"]
        ours += [g for g, kind in zip(gradients, order, strict=True) if kind == "parameter"]
        for mine, theirs in zip(ours, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_threads_capture_without_disturbing_each_other() -> None:
    """Tracing patches nn.Module for the whole process."""
    before = nn.Module.__call__

    def captured(size: int) -> str:
        model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
        return str(capture(model, (torch.randn(4, size),), mode="train").forward)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(captured, range(2, 14)))
    assert nn.Module.__call__ is before
    assert found == [captured(size) for size in range(2, 14)]


def test_several_inputs_given_one_by_one_are_a_clear_error() -> None:
    given: Any = torch.rand(5, 3)
    with pytest.raises(ProblemError, match="one tuple"):
        fusewright.optimize(nn.Bilinear(2, 3, 4), torch.rand(5, 2), given)
