"""The checker itself: right candidates pass, and each way of being wrong is caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.errors import DeviceError, ProblemError, VerifyError
from fusewright.problem.inputs import LAYOUTS, laid_out
from fusewright.problem.load import Arguments, Problem
from fusewright.verify.compare import Values, compare
from fusewright.verify.verify import Report, verify


class Norm(nn.Module):
    """A product, a batch norm, a scalar parameter and a ReLU: something of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 6)
        self.bn = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.linear(x)) * self.scale)


def problem_of(model: type[nn.Module], *shapes: tuple[int, ...]) -> Problem:
    return Problem(
        name=model.__name__,
        path=None,
        source="",
        make_model=model,
        make_inputs=lambda: tuple(torch.randn(shape) for shape in shapes),
        make_init=Arguments,
    )


def check(
    model: type[nn.Module], candidate: Callable[[], nn.Module], *, modes: tuple[str, ...] = ()
) -> Report:
    problem = problem_of(model, (16, 12))
    return verify(problem, candidate, device="cpu", modes=modes or ("train", "eval"))


def failed(report: Report) -> set[str]:
    return {each.name for each in report.checks if not each.ok}


def test_the_model_passes_against_itself() -> None:
    report = check(Norm, Norm)
    assert report.ok, failed(report)
    names = [each.name for each in report.checks]
    results = ["output", "buffer bn.running_mean", "buffer bn.num_batches_tracked", "grad x0"]
    for result in [*results, "grad scale", "grad linear.weight", "grad bn.bias"]:
        assert f"train: {result}" in names
        assert f"eval: {result}" in names
    assert "eval, no_grad: output" in names
    assert "eval, no_grad, NaN: output" in names
    for each in report.checks:
        assert each.error <= each.allowed
        assert each.eager_error <= 1e-5


def test_another_order_of_rounding_passes() -> None:
    class Reversed(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(0)).flip(0)

    for _ in range(5):
        report = check(Norm, Reversed)
        assert report.ok, [each for each in report.checks if not each.ok]


def test_a_seed_repeats_the_figures() -> None:
    problem = problem_of(Norm, (16, 12))
    first, second = (verify(problem, Norm, device="cpu", seed=3) for _ in range(2))
    assert first == second
    assert verify(problem, Norm, device="cpu") != verify(problem, Norm, device="cpu")


def test_a_wrong_gradient_is_caught() -> None:
    class Wrong(Norm):
        def forward(self, x: Tensor) -> Tensor:
            # The bias counts once forward and 1.001 times backward.
            linear, bias = self.linear, self.linear.bias
            bias = 1.001 * bias - 0.001 * bias.detach()
            y = F.linear(x, linear.weight, bias)
            return torch.relu(self.bn(y) * self.scale)

    # In train mode the batch norm takes the bias out again: its gradient is zero.
    names = {"eval: grad linear.bias", "eval, new parameters: grad linear.bias"}
    assert failed(check(Norm, Wrong)) == names


def test_a_wrong_buffer_is_caught() -> None:
    class Forgetful(Norm):
        def forward(self, x: Tensor) -> Tensor:
            y = F.batch_norm(
                self.linear(x),
                None if self.training else self.bn.running_mean,
                None if self.training else self.bn.running_var,
                self.bn.weight,
                self.bn.bias,
                training=self.training,
            )
            return torch.relu(y * self.scale)

    wrong = {"running_mean", "running_var", "num_batches_tracked"}
    modes = ("train", "train, no_grad")
    expected = {f"{mode}: buffer bn.{each}" for mode in modes for each in wrong}
    assert failed(check(Norm, Forgetful)) == expected


def test_the_initial_statistics_written_into_the_code_are_caught() -> None:
    class Baked(Norm):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return super().forward(x)
            y = self.linear(x) / math.sqrt(1 + 1e-5) * self.bn.weight + self.bn.bias
            return torch.relu(y * self.scale)

    assert "eval: output" in failed(check(Norm, Baked))


def test_zeros_are_caught() -> None:
    class Zeros(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0

    report = check(Norm, Zeros)
    assert "train: output" in failed(report)
    assert next(each for each in report.checks if each.name == "train: output").note == "all zero"


def test_an_unwritten_result_is_caught() -> None:
    class Unwritten(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty_like(super().forward(x))

    report = check(Norm, Unwritten)
    for mode in ("train", "eval", "eval, no_grad"):
        assert f"{mode}: output" in failed(report)


def test_a_remembered_result_is_caught() -> None:
    class Remembering(Norm):
        def forward(self, x: Tensor) -> Tensor:
            # By address, type and mode, as a careless cache would do it.
            cache: dict[object, Tensor] = self.__dict__.setdefault("cache", {})
            key = (x.data_ptr(), id(x), self.training)
            if torch.is_grad_enabled():
                cache[key] = super().forward(x)
            return cache[key]

    names = failed(check(Norm, Remembering, modes=("eval",)))
    assert "eval, no_grad: output" in names
    assert not any(name.startswith("eval: ") for name in names)


def test_a_scalar_parameter_taken_out_by_item_is_caught() -> None:
    class Item(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.bn(self.linear(x)) * self.scale.item())

    report = check(Norm, Item)
    modes = ("train", "eval", "eval, new parameters")
    assert failed(report) == {f"{mode}: grad scale" for mode in modes}
    assert all("missing" in each.note for each in report.checks if not each.ok)


class _FlatBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        """Reads the gradient's memory in order, whatever its strides are."""
        (x,) = ctx.saved_tensors
        memory = tangents[0].as_strided(
            (tangents[0].untyped_storage().nbytes() // 4,), (1,), storage_offset=0
        )
        flat = memory.repeat(x.numel())[: x.numel()] if memory.numel() < x.numel() else memory
        return flat[: x.numel()].reshape(x.shape) * (x > 0)


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class FlatRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _FlatBackward.apply(x)


def test_a_backward_that_assumes_contiguous_gradients_is_caught() -> None:
    report = check(Relu, FlatRelu)
    assert failed(report) == {"train: grad x0", "eval: grad x0"}
    for each in report.checks:
        assert each.ok or "transposed" in each.note or "sliced" in each.note


def test_a_relu_that_swallows_nan_is_caught() -> None:
    class Swallowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fmax(x, torch.zeros(()))

    report = check(Relu, Swallowing)
    assert "eval, no_grad, NaN: output" in failed(report)
    assert not any("grad" not in name and "NaN" not in name for name in failed(report))


def test_a_changed_argument_is_caught() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = torch.relu(x)
                x.detach().zero_()
            return y + 0 * x

    assert "eval, no_grad: input x0" in failed(check(Relu, Writing))


def test_layouts_hold_the_same_values() -> None:
    tangent = torch.randn(3, 4, 5)
    layouts = {layout: laid_out(tangent, layout) for layout in LAYOUTS}
    for layout in ("contiguous", "transposed", "sliced"):
        assert torch.equal(layouts[layout], tangent)
    assert torch.equal(layouts["expanded"], tangent[0, 0, 0].expand(3, 4, 5))
    strides = {layout: each.stride() for layout, each in layouts.items()}
    assert strides == {
        "contiguous": (20, 5, 1),
        "expanded": (0, 0, 0),
        "transposed": (1, 3, 12),
        "sliced": (40, 10, 2),
    }
    for shape in ((), (0, 3)):
        for layout in LAYOUTS:
            assert laid_out(torch.ones(shape), layout).shape == shape
    index = torch.tensor([3, 1, 2])
    assert laid_out(index, "sliced").tolist() == [3, 1, 2]


def test_trees_and_integers_are_compared_by_name() -> None:
    class Pair(NamedTuple):
        values: Tensor
        index: Tensor

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 3)

        def forward(self, index: Tensor, more: dict[str, Tensor]) -> object:
            y = self.table(index) * more["m"]
            return {"y": y, "pair": Pair(y.sum(), y.argmax(-1)), "n": 3}

    class WrongIndex(Tree):
        def forward(self, index: Tensor, more: dict[str, Tensor]) -> object:
            tree = super().forward(index, more)
            assert isinstance(tree, dict)
            return {**tree, "pair": Pair(tree["pair"].values, (tree["pair"].index + 1) % 3)}

    def inputs() -> tuple[object, ...]:
        return torch.randint(7, (5,)), {"m": torch.randn(3)}

    problem = Problem("tree", None, "", Tree, inputs, Arguments)
    report = verify(problem, Tree, device="cpu")
    assert report.ok
    names = {each.name for each in report.checks}
    outputs = ["output['y']", "output['pair'][0]", "output['pair'][1]", "output['n']"]
    gradients = ["grad x1['m']", "grad table.weight"]
    assert {f"train: {each}" for each in (*outputs, *gradients)} <= names
    assert "train: output['pair'][1]" in failed(verify(problem, WrongIndex, device="cpu"))


def test_a_random_model_is_compared_with_eager() -> None:
    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training) * 2

    class Heavier(Drop):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.01

    report = check(Drop, Drop)
    assert report.ok
    notes = {each.name: each.note for each in report.checks}
    assert "random model" in notes["train: output"]
    assert "random model" not in notes["eval: output"]
    assert {"train: output", "train: grad x0"} <= failed(check(Drop, Heavier))


def test_types_named_in_the_model_become_float64_in_the_true_run() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.to(torch.float32).float() @ torch.full((12, 3), 1 / 3, dtype=torch.float32)
            return (y + torch.ones(3)).to(x.dtype)

    report = check(Narrow, Narrow)
    assert report.ok
    output = report.checks[0]
    assert (output.name, output.note) == ("train: output", "")
    assert 1e-9 < output.eager_error < 1e-6


def test_without_a_float64_run_eager_stands_in() -> None:
    weights = torch.randn(12, 3)  # No part of the model: stays float32.

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ weights

    report = check(Fixed, Fixed)
    assert report.ok
    assert all("no float64 run" in each.note for each in report.checks)


def test_a_model_that_writes_into_its_argument() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(1 / 3).sin()

    class Sparing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * (1 / 3)).sin()

    assert check(InPlace, InPlace).ok
    assert failed(check(InPlace, Sparing, modes=("eval",))) == {
        f"{mode}: input x0" for mode in ("eval", "eval, no_grad", "eval, no_grad, NaN")
    }


def test_half_precision_is_held_to_its_own_rounding() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x.half()) * 3

    class Off(Half):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.01

    problem = problem_of(Half, (64, 33))
    assert verify(problem, Half, device="cpu").ok
    assert "train: output" in failed(verify(problem, Off, device="cpu"))


class DoubleNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class DroppingNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


@pytest.mark.parametrize("model", [DoubleNorm, DroppingNorm])
def test_without_a_truer_run_rounding_is_allowed_and_errors_are_not(model: type[Norm]) -> None:
    def again(self: Norm, x: Tensor, factor: float) -> Tensor:
        order = torch.arange(self.linear.in_features - 1, -1, -1)
        y = F.linear(x.to(self.linear.weight.dtype)[:, order], self.linear.weight[:, order])
        y = torch.relu(self.bn(y + self.linear.bias * factor) * self.scale)
        return F.dropout(y, 0.3, self.training) if isinstance(self, DroppingNorm) else y

    for factor in (1.0, 1.01):
        forward = {"forward": lambda self, x, factor=factor: again(self, x, factor)}
        report = check(model, type("New", (model,), forward))
        # In train mode the batch norm takes the factor out again, but for the running mean.
        assert ("eval: output" in failed(report)) == (factor != 1.0)
        assert report.ok == (factor == 1.0), failed(report)


def test_other_parameters_and_other_outputs_cannot_be_compared() -> None:
    class Wider(Norm):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(2))

    class Two(Norm):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    class Failing(Norm):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("kernel exploded")

    with pytest.raises(VerifyError, match=r"extra is float32\[2\] with gradient in the candidate"):
        check(Norm, Wider)
    with pytest.raises(VerifyError, match=r"returns output\[0\], output\[1\] where .* output$"):
        check(Norm, Two)
    with pytest.raises(VerifyError, match="fails in train: ValueError: kernel exploded"):
        check(Norm, Failing)
    with pytest.raises(ProblemError, match="the model itself fails in train"):
        verify(problem_of(Norm, (16, 11)), Norm, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(DeviceError, match="no CUDA device here; use the device cpu"):
        verify(problem_of(Norm, (16, 12)), Norm, device="cuda")


def test_figures_of_a_comparison() -> None:
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    eager = torch.tensor([3.0, 4.0 + 1e-3])
    ours = torch.tensor([3.0 + 2e-3, 4.0])
    made = compare("y", Values(ours, eager, truth, 1.0))
    assert made.error == pytest.approx(4e-4, rel=1e-3)
    assert made.eager_error == pytest.approx(2e-4, rel=1e-3)
    assert made.allowed == pytest.approx(4e-4, rel=1e-2)
    nan = torch.tensor([math.nan, 1.0])
    assert compare("y", Values(nan, nan, nan.double(), 1.0)).ok
    assert not compare("y", Values(torch.tensor([0.0, 1.0]), nan, nan.double(), 1.0)).ok
    assert not compare("y", Values(nan, torch.ones(2), torch.ones(2).double(), 1.0)).ok
    assert not compare("y", Values(torch.ones(2, 1), torch.ones(2), None, 1.0)).ok
    assert not compare("y", Values(torch.ones(2).double(), torch.ones(2), None, 1.0)).ok
    # No gradient where eager has none: zeros say the same, ones do not.
    assert compare("g", Values(torch.zeros(2), None, None, 1.0)).ok
    assert not compare("g", Values(torch.ones(2), None, None, 1.0)).ok


def test_a_result_that_is_zero_but_for_rounding_is_measured_by_its_neighbours() -> None:
    truth = torch.zeros(4, dtype=torch.float64)
    eager, ours = torch.full((4,), 1e-7), torch.full((4,), -3e-7)
    made = compare("g", Values(ours, eager, truth, 1.0))
    assert made.ok
    assert made.error == pytest.approx(3e-7)
    assert not compare("g", Values(torch.full((4,), 1e-5), eager, truth, 1.0)).ok
