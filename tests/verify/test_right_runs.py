"""Eager's error may be small by luck: further right runs show what is rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.verify.compare import Values, compare
from fusewright.verify.feeds import Feed
from fusewright.verify.others import eager_runs, right_runs
from fusewright.verify.precision import RoundResults
from fusewright.verify.reference import Reference
from fusewright.verify.scenarios import PLAIN_LAYOUT, Scenario
from fusewright.verify.verify import verify
from fusewright.verify.wide import last_digit_changed
from tests.support.verified import problem_of


class Cancelling(nn.Module):
    """With a constant incoming gradient, the gradient of the bias cancels almost completely."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + F.gelu(self.linear(x)))


class _Norm(torch.autograd.Function):
    """A layer norm; backward's mean is off by one unit in the last place, alike in each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = x.double()
        scale = torch.rsqrt(wide.var(-1, unbiased=False, keepdim=True) + eps)
        normed = ((wide - wide.mean(-1, keepdim=True)) * scale).float()
        ctx.save_for_backward(normed, scale.float(), weight)
        return normed * weight + bias

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        normed, scale, weight = ctx.saved_tensors
        scaled = tangents[0] * weight
        mean = scaled.double().mean(-1, keepdim=True).float()
        mean = torch.nextafter(mean, torch.tensor(torch.inf))
        along = (scaled * normed).mean(-1, keepdim=True)
        change = (scaled - mean - normed * along) * scale
        return change, (tangents[0] * normed).sum(0), tangents[0].sum(0), None


class MeanRounded(Cancelling):
    def forward(self, x: Tensor) -> Tensor:
        y = x + F.gelu(self.linear(x))
        result: Tensor = _Norm.apply(y, self.norm.weight, self.norm.bias, self.norm.eps)
        return result


def test_a_sum_that_cancels_is_measured_by_its_data() -> None:
    for seed in range(3, 8):
        problem = problem_of(Cancelling, (96, 128))
        report = verify(problem, MeanRounded, device="cpu", modes=("train",), seed=seed)
        assert report.ok, [each for each in report.checks if not each.ok]


def test_an_error_beyond_that_is_wrong() -> None:
    class Off(Cancelling):
        def forward(self, x: Tensor) -> Tensor:
            bias = 1.00005 * self.linear.bias - 0.00005 * self.linear.bias.detach()
            return self.norm(x + F.gelu(F.linear(x, self.linear.weight, bias)))

    report = verify(problem_of(Cancelling, (96, 128)), Off, device="cpu", modes=("train",), seed=0)
    wrong = {each.name for each in report.checks if not each.ok}
    assert "train: grad linear.bias" in wrong


def test_the_runs_are_right_and_differ() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 3, 12, 12)
    reference = Reference(model, Feed(((x,),), seed=0), 0, "eval")
    question = reference.question(Scenario(gradients=True, mode="eval"), (x,))
    assert question is not None
    expected = reference.expect(Scenario(gradients=True, mode="eval"), (x,))
    assert expected is not None
    truth = expected.truth["contiguous"]["output"]
    assert isinstance(truth, Tensor)
    runs = right_runs(reference, question, PLAIN_LAYOUT[0])
    assert len(runs) == 3 and len(eager_runs(reference, question, PLAIN_LAYOUT[0])) == 3
    for run in runs:
        output = run["output"]
        assert isinstance(output, Tensor)
        off = (output.double() - truth).norm() / truth.norm()
        assert 1e-9 < off < 1e-6


def test_only_the_last_digit_is_changed() -> None:
    x = torch.randn(1000)
    changed = last_digit_changed(0)(x)
    assert isinstance(changed, Tensor) and changed.dtype == torch.float64
    off = (changed - x.double()).abs() / x.double().abs()
    assert 0 < off.max() <= torch.finfo(torch.float32).eps
    index = torch.arange(3)
    assert last_digit_changed(0)(index) is index


def test_a_run_that_is_itself_wrong_is_no_measure() -> None:
    truth = torch.randn(400, dtype=torch.float64)
    eager, ours = truth.float(), (truth * 1.00001).float()
    assert not compare("y", Values(ours, eager, truth, 1.0)).ok
    assert compare("y", Values(ours, eager, truth, 1.0, others=[truth * 0.99999])).ok
    assert not compare("y", Values(ours, eager, truth, 1.0, others=[truth * 1.1, None])).ok


class ManyFeatures(nn.Module):
    """Its weight's gradient cancels for an incoming gradient that is the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + 100.0)


def test_other_last_digits_show_what_cancels_without_float64() -> None:
    model, x = ManyFeatures(), torch.rand(2, 64, 16, 16)
    reference = Reference(model, Feed(((x,),), seed=0), 0, "train")
    scenario = Scenario(gradients=True, layouts=("expanded",))
    question, expected = reference.question(scenario, (x,)), reference.expect(scenario, (x,))
    assert question is not None and expected is not None
    runs = eager_runs(reference, question, "expanded")
    off = {
        name: [distance(run[name], expected.eager["expanded"][name]) for run in runs]
        for name in ("output", "grad norm.weight", "grad norm.bias")
    }
    assert off["grad norm.weight"][2] > 1e-5 and 1e-6 < off["output"][2] < 1e-3
    assert off["grad norm.bias"][2] < 1e-6
    assert off["output"][1] == 0.0  # without TF32, which a CPU has not


def distance(one: object, other: object) -> float:
    assert isinstance(one, Tensor) and isinstance(other, Tensor)
    return float((one - other).norm() / other.norm())


class Saturated(nn.Module):
    """A softmax of ones and zeros: its gradient cancels, and eager's is zero by luck."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(1e4 * self.linear(x), dim=-1)
        return torch.cat([weights, 1e-6 * x], dim=1)


def test_rounded_results_show_what_cancels_between_operators() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    reference = Reference(Saturated(), Feed(((x,),), seed=0), 0, "eval")
    scenario = Scenario(gradients=True, mode="eval")
    question, expected = reference.question(scenario, (x,)), reference.expect(scenario, (x,))
    assert question is not None and expected is not None
    truth, eager = expected.truth["contiguous"]["grad x0"], expected.eager["contiguous"]["grad x0"]
    *_, rounded = right_runs(reference, question, PLAIN_LAYOUT[0])
    assert distance(eager, truth) < 1e-6 and distance(rounded["grad x0"], truth) > 1.0
    assert distance(rounded["output"], expected.truth["contiguous"]["output"]) < 1e-6


def test_what_chooses_values_is_not_rounded() -> None:
    x = torch.randn(50, dtype=torch.float64).requires_grad_()
    with RoundResults(0):
        top, largest = x.amax(), torch.relu(x).clamp(max=0.5).sort().values
        product = x * 3.0
        (gradient,) = torch.autograd.grad(top, x)  # shared by all elements that equal the largest
    assert torch.equal(top, x.max()) and torch.equal(largest, x.clamp(0.0, 0.5).sort().values)
    assert abs(float(gradient.sum()) - 1.0) < 1e-6
    off = (product / (3.0 * x) - 1.0).abs()
    assert 0.0 < float(off.max()) <= torch.finfo(torch.float32).eps
