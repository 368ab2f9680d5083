"""Both gradients of a convolution from one staged input, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile.pipeline import prepare
from fusewright.target.target import Target
from tests.support.emulated_modules import as_exact_as_eager, gradients_alone, share_staged, trained
from tests.support.staging_models import STAGING_MODELS, ConvolutionAndLoop


class Wide(nn.Module):
    """Several blocks of 64 channels, groups, strides, and a normalisation between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(70, 160, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(160)
        self.second = nn.Conv2d(160, 96, 3, stride=2, padding=1, groups=2)
        self.third = nn.Conv2d(96, 130, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(x))))
        return torch.nn.functional.silu(self.third(hidden))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    share_staged(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # without, there are none


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("kind", [*STAGING_MODELS, Wide])
def test_gradients_are_as_exact_as_eager(
    kind: type[nn.Module], tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    model = kind().cuda()
    shape = (5, 70, 19, 23) if kind is Wide else (5, 6, 10, 8)
    x = torch.randn(shape, device="cuda")
    fast = fusewright.optimize(copy.deepcopy(model), x.requires_grad_(), modes=("train",))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    for images in (5, 3, 65):
        x = torch.randn(images, *shape[1:], device="cuda")
        as_exact_as_eager(fast, model, x, 2e-6)


def sharing(model: nn.Module, x: Tensor) -> int:
    """How many weight gradients read input that another kernel staged."""
    given = (x.detach().requires_grad_(),)
    found = prepare(model, given, modes=("train",), device=x.device, target=Target.cuda())
    plan = found.modes[0].backward
    assert plan is not None
    gradients = [step.kernel for step in plan.steps if step.kind == "weight_gradient"]
    return sum(each.back is not None for each in gradients)


@pytest.mark.parametrize(("ins", "outs", "size"), [(64, 128, 56), (256, 256, 14)])
def test_usual_sizes_share_by_the_cost_model(ins: int, outs: int, size: int) -> None:
    """The bits repeat, and errors are eager's where images differ in magnitude."""
    torch.manual_seed(3)
    model = ConvolutionAndLoop(ins, outs).cuda()
    x = torch.randn(64, ins, size, size, device="cuda")
    assert sharing(model, x) == 1
    fast = fusewright.optimize(copy.deepcopy(model), x.requires_grad_(), modes=("train",))
    first, again = trained(fast, x.detach()), trained(fast, x.detach())
    assert all(map(torch.equal, first, again))
    as_exact_as_eager(fast, model, x.detach(), 1e-6)
    jumping = torch.exp2(torch.arange(64, device="cuda") % 5 * 7.0).view(-1, 1, 1, 1)
    as_exact_as_eager(fast, model, x.detach() * jumping, 1e-6)
    dropped = (torch.arange(64, device="cuda") % 3 > 0).view(-1, 1, 1, 1)
    small = _Smaller(fast, dropped * 1e-9), _Smaller(model, dropped * 1e-9)
    as_exact_as_eager(*small, x.detach(), 1e-6)


class _Smaller(nn.Module):
    """Scales the output of each image, some by zero, so that gradients are small."""

    def __init__(self, inner: nn.Module, factors: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factors  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("wanted", ["input", "weights"])
def test_one_gradient_alone(wanted: str) -> None:
    torch.manual_seed(3)
    model = ConvolutionAndLoop(64, 128).cuda()
    x = torch.randn(64, 64, 56, 56, device="cuda")
    fast = fusewright.optimize(copy.deepcopy(model), x.requires_grad_(), modes=("train",))
    for ours, eager in gradients_alone(fast, model, x, wanted):
        assert float((ours - eager).norm() / eager.norm()) < 2e-2  # ties at the clamp


@pytest.mark.usefixtures("always")
def test_infinity_and_nan_are_where_they_belong() -> None:
    torch.manual_seed(3)
    model = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    x = torch.randn(8, 64, 40, 40, device="cuda")
    assert sharing(model, x) == 1
    fast = fusewright.optimize(copy.deepcopy(model), x.requires_grad_(), modes=("train",))
    grad_output = torch.randn(8, 64, 40, 40, device="cuda")
    grad_output[3, 5, 7, 9], grad_output[4, 6, 1, 1] = float("inf"), 1e9
    results = []
    for each in (fast, model):
        given = x.detach().requires_grad_()
        results.append(torch.autograd.grad(each(given), [given, each.weight], grad_output))
    for ours, eager in zip(*results, strict=True):
        assert torch.equal(ours.isfinite(), eager.isfinite())
        there = eager.isfinite()
        assert float((ours[there] - eager[there]).norm() / eager[there].norm()) < 2e-3
