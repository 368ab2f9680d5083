"""Outputs and gradients of small modules, and the ways to ask for second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def output_and_gradients(
    model: nn.Module, x: torch.Tensor, tangent: torch.Tensor | None = None
) -> list[Any]:
    """The output, and the gradients of x and of every parameter."""
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y) if tangent is None else tangent)
    return [y.detach(), x.grad, *[each.grad for each in model.parameters()]]


def hessian_product(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.autograd.functional.hvp(lambda z: model(z).square().sum(), x, torch.ones_like(x))


def penalty(model: nn.Module, x: torch.Tensor) -> Any:
    (grad,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), tuple(model.parameters()), allow_unused=True)


def second_backward(model: nn.Module, x: torch.Tensor) -> Any:
    model(x.requires_grad_()).square().sum().backward(create_graph=True)


def refuses_second_derivatives(model: nn.Module, match: str = "call the original model") -> None:
    """Each way to ask for them raises. Autograd would answer zeros or None without a path."""
    for ask in (hessian_product, penalty, second_backward):
        with pytest.raises(RuntimeError, match=match):
            ask(model, torch.randn(4, 3))


def medley_results(model: nn.Module, x: torch.Tensor, index: torch.Tensor) -> dict[str, Any]:
    """Outputs and gradients of a medley call that uses every differentiable output."""
    model.zero_grad()
    out = model(x, index, True)
    again, same = out["again"]
    scale = torch.arange(3 * len(x), dtype=torch.float32)
    total = out["y"].sum() + 3 * again.sum() + (5 * same * same).sum() + (out["flat"] * scale).sum()
    total.backward()
    grads = [x.grad, *[each.grad for each in model.parameters()]]
    kinds = {k: v.requires_grad for k, v in out.items() if isinstance(v, torch.Tensor)}
    return {"out": out, "grads": grads, "kinds": kinds, "count": int(model.count)}
