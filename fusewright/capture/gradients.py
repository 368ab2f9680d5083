"""Gradients whose decomposition in PyTorch is less exact than its kernels, or hides a NaN.

Each takes and returns tensors as the ATen operator of its name does. 16-bit operands are computed
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp.decompositions import pw_cast_for_opmath

_MEAN = 1  # PyTorch's number for a reduction


def gradient_decompositions() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {
        aten.soft_margin_loss_backward.default: _soft_margin_loss,
        aten.smooth_l1_loss_backward.default: _smooth_l1_loss,
        aten.logit_backward.default: _logit,
    }
    return {op: pw_cast_for_opmath(each) for op, each in found.items()}


def _soft_margin_loss(grad: Any, x: Any, target: Any, reduction: int) -> Any:
    """d/dx log(1 + exp(-t·x)) = -t · sigmoid(-t·x). PyTorch subtracts 1 from sigmoid(t·x), which
    leaves no digits where that is almost 1."""
    slope = -target * torch.sigmoid(-target * x) * grad
    return slope / x.numel() if reduction == _MEAN else slope


def _smooth_l1_loss(grad: Any, x: Any, target: Any, reduction: int, beta: float) -> Any:
    """d/dx is sign(d) from |d| = beta on, else d / beta, for d = x - target. So NaN stays NaN."""
    apart = x - target
    grad = grad / x.numel() if reduction == _MEAN else grad
    linear = apart.abs() >= beta
    return torch.where(linear, grad * apart.sign(), grad * apart / beta)


def _logit(grad: Any, x: Any, eps: float | None = None) -> Any:
    """d/dx log(x / (1 - x)) = 1 / (x · (1 - x)); 0 where `eps` cuts x off. NaN is not cut off."""
    slope = grad / (x * (1.0 - x))
    low = 0.0 if eps is None else eps
    outside = torch.logical_or(x < low, x > 1.0 - low)
    return torch.where(outside, float("nan") if eps is None else 0.0, slope)


def affine_grid_gradient(grad: Any, size: Any, align_corners: bool) -> Any:
    """The same as PyTorch's, whose C++ needs numbers where the batch is a symbol: the grid is a
    product of the positions in an image, from -1 to 1, with each image's matrix."""
    batch, _, *spatial = size
    lines = [_positions(grad, length, align_corners) for length in reversed(spatial)]
    shapes = [(length, *[1] * at) for at, length in enumerate(reversed(spatial))]
    each = [line.view(shape).expand(spatial) for line, shape in zip(lines, shapes, strict=True)]
    base = torch.stack([*each, grad.new_ones(spatial)], -1).view(-1, len(spatial) + 1)
    return grad.reshape(batch, -1, len(spatial)).transpose(1, 2) @ base


def cumprod_gradient(grad: Any, x: Any, dim: int, result: Any) -> Any:
    """Σ_{j ≥ i} g_j · y_j / x_i before the first zero of x, and 0 behind it. At the zero itself it
    is the sum, up to the next zero, of g_j times the product of the others. PyTorch 2.11 traces
    steps for each element, which takes minutes for rows of thousands."""
    if not x.dim():
        return grad
    zero = x == 0
    zeros = zero.cumsum(dim)
    before = zeros == 0
    tail = torch.where(before, grad * result.conj(), 0.0).flip(dim).cumsum(dim).flip(dim)
    first = torch.logical_and(zero, zeros == 1)
    others = torch.where(first, 1.0, x).cumprod(dim).conj()
    at_zero = torch.where(zeros == 1, grad * others, 0.0).sum(dim, keepdim=True)
    behind = torch.where(first, at_zero, 0.0)
    return torch.where(before, tail / torch.where(zero, 1.0, x).conj(), behind)


def _positions(like: Any, length: Any, align_corners: bool) -> Any:
    if length <= 1:
        return like.new_zeros(length)
    line = torch.linspace(-1, 1, length, dtype=like.dtype, device=like.device)
    return line if align_corners else line * (length - 1) / length
