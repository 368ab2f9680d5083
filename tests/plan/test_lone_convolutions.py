"""Convolutions of one tap with no loop beside them are matmuls, which stay PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusewright.rewrite import convolutions
from tests.support.plans import called_operators, prepared_for_training


@pytest.fixture
def worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are expected to be faster at any size."""
    monkeypatch.setattr(convolutions, "is_worthwhile", lambda *_: True)


@pytest.mark.parametrize(
    ("after", "bias", "ours"),
    [
        (nn.Identity(), False, 0),
        (nn.Identity(), True, 2),
        (nn.SiLU(), False, 2),
        (nn.GroupNorm(4, 128), False, 2),
    ],
)
@pytest.mark.usefixtures("worthwhile")
def test_a_loop_beside_it_makes_it_ours(after: nn.Module, bias: bool, ours: int) -> None:
    """With a loop after it, forward and inference have our kernel; alone, both call PyTorch's."""
    model = nn.Sequential(nn.Conv2d(64, 128, 1, bias=bias), after)
    found = prepared_for_training(model, torch.randn(16, 64, 32, 32)).modes[0]
    kinds = [step.kind for plan in (found.forward, found.inference) for step in plan.steps]
    assert kinds.count("convolution") == ours
    called = called_operators(found.forward, found.inference)
    assert called.count("aten.convolution.default") == 2 - ours


@pytest.mark.usefixtures("worthwhile")
def test_more_taps_are_ours_without_a_loop() -> None:
    model = nn.Conv2d(64, 128, 3, bias=False)
    found = prepared_for_training(model, torch.randn(16, 64, 32, 32)).modes[0]
    assert [step.kind for step in found.inference.steps] == ["convolution"]
