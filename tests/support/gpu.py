"""What tests on a GPU share: the mark of those that need a Hopper, and training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusewright

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


def trained_on_gpu(model: nn.Module, x: Tensor, seed: int = 1) -> list[Tensor]:
    """Outputs and gradients."""
    given = x.detach().clone().requires_grad_()
    y = model(given)
    generator = torch.Generator("cuda").manual_seed(seed)
    grad = torch.randn(y.shape, device="cuda", generator=generator).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [given, *model.parameters()], grad)]


def eager_and_exact(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of eager mode, and of float64."""
    return trained_on_gpu(model, x), trained_on_gpu(copy.deepcopy(model).double(), x.double())


def optimized_copy(model: nn.Module, x: Tensor, **kwargs: object) -> nn.Module:
    return fusewright.optimize(copy.deepcopy(model), x, **kwargs)  # type: ignore[arg-type]
