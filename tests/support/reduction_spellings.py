"""Reductions, softmaxes, norms and losses, each in two spellings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.spelling import (
    FORWARD,
    IMAGES,
    INFERENCE,
    NOTHING,
    OVERFLOW,
    ROUNDING,
    STEPS,
    TIES,
    TWO,
    Table,
    layer,
)

REDUCTIONS = Table()
REDUCTIONS.add(
    "mean",
    lambda m, x: x.mean(-1),
    lambda m, x: x.sum(-1) / x.shape[-1],
    same=FORWARD,
    why="the gradient is divided before or after it is expanded",
)
REDUCTIONS.add(
    "mean of images",
    lambda m, x: x.mean((2, 3), keepdim=True),
    lambda m, x: F.adaptive_avg_pool2d(x, 1),
    IMAGES,
)
REDUCTIONS.add(
    "mean by a pool",
    lambda m, x: x.mean((2, 3), keepdim=True),
    lambda m, x: F.avg_pool2d(x, (10, 12)),
    IMAGES,
)
REDUCTIONS.add(
    "mean of tiles",
    lambda m, x: F.avg_pool2d(x, (5, 7)),
    lambda m, x: x[..., :7].unflatten(2, (2, 5)).mean((3, 4)).unsqueeze(-1),
    IMAGES,
    same=FORWARD,
    why=ROUNDING,
)
REDUCTIONS.add(
    "max", lambda m, x: x.amax(-1), lambda m, x: x.max(-1).values, same=INFERENCE, why=TIES
)
REDUCTIONS.add(
    "min", lambda m, x: x.amin(-1), lambda m, x: x.min(-1).values, same=INFERENCE, why=TIES
)
REDUCTIONS.add("values of max", lambda m, x: x.max(dim=-1)[0], lambda m, x: torch.max(x, -1).values)
REDUCTIONS.add(
    "norm", lambda m, x: x.norm(dim=-1), lambda m, x: torch.linalg.vector_norm(x, dim=-1)
)
REDUCTIONS.add(
    "norm by hand",
    lambda m, x: x.norm(dim=-1),
    lambda m, x: x.square().sum(-1).sqrt(),
    same=FORWARD,
    why="the gradient of a norm of zero is zero",
)
REDUCTIONS.add("1-norm", lambda m, x: x.norm(p=1, dim=-1), lambda m, x: x.abs().sum(-1))
REDUCTIONS.add(
    "normalize",
    lambda m, x: F.normalize(x, dim=-1),
    lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12),
)
REDUCTIONS.add(
    "variance",
    lambda m, x: x.var(-1, unbiased=False),
    lambda m, x: (x - x.mean(-1, keepdim=True)).pow(2).mean(-1),
    same=NOTHING,
    why=ROUNDING,
)
REDUCTIONS.add(
    "variance, correction",
    lambda m, x: x.var(-1, unbiased=False),
    lambda m, x: torch.var(x, -1, correction=0),
)
REDUCTIONS.add(
    "deviation",
    lambda m, x: x.std(-1),
    lambda m, x: x.var(-1).sqrt(),
    same=FORWARD,
    why="the gradient of a deviation of zero is zero",
)
REDUCTIONS.add(
    "keepdim",
    lambda m, x: x / x.sum(-1, keepdim=True),
    lambda m, x: x / x.sum(-1).unsqueeze(-1),
)
REDUCTIONS.add(
    "sum of sums",
    lambda m, x: x.exp().sum((1, 2, 3)),
    lambda m, x: x.exp().sum(3).sum(2).sum(1),
    IMAGES,
)
REDUCTIONS.add(
    "sum by einsum",
    lambda m, x, y: (x * y).sum(-1),
    lambda m, x, y: torch.einsum("ij,ij->i", x, y),
    *TWO,
)
REDUCTIONS.add(
    "logsumexp by hand",
    lambda m, x: torch.logsumexp(x, -1),
    lambda m, x: torch.log(torch.sum(torch.exp(x), -1)),
    same=NOTHING,
    why=OVERFLOW,
)

SOFTMAXES = Table()
SOFTMAXES.add(
    "softmax: nn",
    lambda m, x: F.softmax(x, -1),
    lambda m, x: m.layer(x),
    held=layer(lambda: nn.Softmax(-1)),
)
SOFTMAXES.add("softmax: method", lambda m, x: F.softmax(x, -1), lambda m, x: x.softmax(1))


def softmax_by_hand(m: Any, x: Tensor) -> Tensor:
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


SOFTMAXES.add(
    "softmax by hand",
    lambda m, x: F.softmax(x, -1),
    softmax_by_hand,
    same=INFERENCE,
    why="the maximum has a gradient of its own",
)
SOFTMAXES.add(
    "log_softmax by hand",
    lambda m, x: F.log_softmax(x, -1),
    lambda m, x: (lambda d: d - d.exp().sum(-1, keepdim=True).log())(x - x.amax(-1, keepdim=True)),
    same=INFERENCE,
    why="the maximum has a gradient of its own",
)
SOFTMAXES.add(
    "log_softmax by logsumexp",
    lambda m, x: F.log_softmax(x, -1),
    lambda m, x: x - torch.logsumexp(x, -1, keepdim=True),
    same=NOTHING,
    why=ROUNDING,
)
SOFTMAXES.add(
    "log of softmax",
    lambda m, x: F.log_softmax(x, -1),
    lambda m, x: torch.log(F.softmax(x, -1)),
    same=NOTHING,
    why=ROUNDING,
)
SOFTMAXES.add(
    "softmax of a transpose",
    lambda m, x: x.softmax(1),
    lambda m, x: x.transpose(1, 2).softmax(-1).transpose(1, 2),
    STEPS,
    same=NOTHING,
    why="their results have different strides",
)

NORMS = Table()
LAYER, RMS, GROUP = (
    layer(make)
    for make in (
        lambda: nn.LayerNorm(40),
        lambda: nn.RMSNorm(40, eps=1e-5),
        lambda: nn.GroupNorm(4, 8),
    )
)


def layer_norm(m: Any, x: Tensor) -> Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(var + 1e-5) * m.layer.weight + m.layer.bias


def layer_norm_by_squares(m: Any, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) * m.layer.weight + m.layer.bias


def layer_norm_by_var_mean(m: Any, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(var + 1e-5) * m.layer.weight + m.layer.bias


NORMS.add(
    "layer_norm: F",
    lambda m, x: m.layer(x),
    lambda m, x: F.layer_norm(x, (40,), m.layer.weight, m.layer.bias),
    held=LAYER,
)
for other in (layer_norm, layer_norm_by_squares):
    NORMS.add(
        other.__name__, lambda m, x: m.layer(x), other, held=LAYER, same=NOTHING, why=ROUNDING
    )
NORMS.add(
    "layer_norm by var_mean",
    lambda m, x: m.layer(x),
    layer_norm_by_var_mean,
    held=LAYER,
    same=FORWARD,
    why=ROUNDING,
)
NORMS.add(
    "layer_norm, weight first",
    layer_norm,
    lambda m, x: (
        m.layer.weight
        * ((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt())
        + m.layer.bias
    ),
    held=LAYER,
)
NORMS.add(
    "rms_norm: F",
    lambda m, x: m.layer(x),
    lambda m, x: F.rms_norm(x, (40,), m.layer.weight, 1e-5),
    held=RMS,
)
NORMS.add(
    "rms_norm by hand",
    lambda m, x: m.layer(x),
    lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * m.layer.weight,
    held=RMS,
)
NORMS.add(
    "rms_norm, weight first",
    lambda m, x: m.layer.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)),
    lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * m.layer.weight,
    held=RMS,
    same=FORWARD,
    why=OVERFLOW,
)
NORMS.add(
    "rms_norm with a quotient",
    lambda m, x: m.layer(x),
    lambda m, x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * m.layer.weight,
    held=RMS,
    same=NOTHING,
    why=ROUNDING,
)
NORMS.add(
    "group_norm: F",
    lambda m, x: m.layer(x),
    lambda m, x: F.group_norm(x, 4, m.layer.weight, m.layer.bias),
    IMAGES,
    held=GROUP,
)
NORMS.add(
    "instance_norm by hand",
    lambda m, x: F.instance_norm(x),
    lambda m, x: (
        (x - x.mean((2, 3), keepdim=True))
        * torch.rsqrt(x.var((2, 3), keepdim=True, unbiased=False) + 1e-5)
    ),
    IMAGES,
    same=NOTHING,
    why=ROUNDING,
)
NORMS.add(
    "batch_norm by hand",
    lambda m, x: F.batch_norm(x, None, None, m.layer.weight, m.layer.bias, training=True),
    lambda m, x: (
        (x - x.mean((0, 2, 3), keepdim=True))
        * torch.rsqrt(x.var((0, 2, 3), keepdim=True, unbiased=False) + 1e-5)
        * m.layer.weight[:, None, None]
        + m.layer.bias[:, None, None]
    ),
    IMAGES,
    held=layer(lambda: nn.BatchNorm2d(8)),
    same=NOTHING,
    why=ROUNDING,
)

LOSSES = Table()
LOSSES.add(
    "mse_loss",
    lambda m, x, y: F.mse_loss(x, y),
    lambda m, x, y: ((x - y) ** 2).mean(),
    *TWO,
    same=INFERENCE,
    why=ROUNDING,
)
LOSSES.add("l1_loss", lambda m, x, y: F.l1_loss(x, y), lambda m, x, y: (x - y).abs().mean(), *TWO)
LOSSES.add(
    "binary cross entropy",
    lambda m, x, y: F.binary_cross_entropy_with_logits(x, y),
    lambda m, x, y: (x.clamp_min(0) - x * y + torch.log1p(torch.exp(-x.abs()))).mean(),
    *TWO,
    same=NOTHING,
    why=ROUNDING,
)
LOSSES.add(
    "cross entropy of probabilities",
    lambda m, x, y: F.cross_entropy(x, y),
    lambda m, x, y: -(y * F.log_softmax(x, -1)).sum(-1).mean(),
    *TWO,
    same=NOTHING,
    why=ROUNDING,
)
