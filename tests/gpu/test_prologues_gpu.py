"""Convolutions that compute their input while they load it, and padded ones, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.plan import prologues
from tests.support.emulated_modules import as_exact_as_eager, use_tensor_cores
from tests.support.models import PADDING_MODES, Padded
from tests.support.prologue_models import PROLOGUE_MODELS


class Wide(nn.Module):
    """Several blocks of 64 channels, groups, and rows that end within a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(160)
        self.first = nn.Conv2d(160, 96, 3, padding=1, groups=2)
        self.second = nn.ConvTranspose2d(96, 40, 4, stride=2, padding=1)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.norm(x)))
        return torch.tanh(self.second(hidden * torch.sigmoid(hidden.mean((2, 3), keepdim=True))))


def errors(fast: nn.Module, model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Ours and eager's, against float64, where that is finite."""
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        ours, eager = fast(x), model(x)
    assert torch.equal(ours.isfinite(), eager.isfinite())
    there = eager.isfinite()
    exact = exact[there]
    wrong = [float((each[there] - exact).norm() / exact.norm()) for each in (ours, eager)]
    return wrong[0], wrong[1]


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("kind", [*PROLOGUE_MODELS, Wide])
def test_computed_inputs_are_as_exact_as_eager(  # type: ignore[no-untyped-def]
    kind: type[nn.Module], tf32: bool, monkeypatch
) -> None:
    use_tensor_cores(monkeypatch)
    monkeypatch.setattr(prologues, "prefers_computed", lambda *_: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # without, there are none
    torch.manual_seed(2)
    model = kind().cuda().eval()
    shape = (5, 160, 19, 23) if kind is Wide else (5, 12, 10, 8)
    x = torch.randn(shape, device="cuda")
    fast = fusewright.optimize(model, x, modes=("eval",))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    for images in (5, 3, 65):
        x = torch.randn(images, *shape[1:], device="cuda")
        x[-1] *= 2.0**12
        ours, eager = errors(fast, model, x)
        assert ours <= max(1e-6, 2 * eager)
    x[0, 3, 2, 1], x[1, 0, 4, 4] = float("inf"), float("nan")
    ours, eager = errors(fast, model, x)
    assert ours <= max(1e-6, 2 * eager)


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(
    ("shape", "padding"), [((3, 5, 17, 19), (1, 1, 1, 1)), ((4, 7, 99), (2, 1))]
)
def test_repeating_padding(shape: tuple[int, ...], padding: tuple[int, ...], mode: str) -> None:
    model, x = Padded(padding, mode), torch.randn(shape, device="cuda")
    fast = fusewright.optimize(model, x, modes=("train",))
    assert torch.equal(fast(x), model(x))
    as_exact_as_eager(fast, model, x, 1e-6)


@pytest.mark.parametrize("mode", PADDING_MODES)
def test_convolutions_of_padded_images(mode: str) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(64, 96, 3, padding=1, padding_mode=mode), nn.ReLU()).cuda()
    x = torch.randn(16, 64, 56, 57, device="cuda")
    fast = fusewright.optimize(model, x, modes=("train",))
    as_exact_as_eager(fast, model, x, 1e-6)
    ours, eager = errors(fast, model, x)
    assert ours <= 1.1 * eager
