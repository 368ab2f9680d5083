"""Matmuls and views, each in two spellings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.spelling import (
    FORWARD,
    IMAGES,
    INFERENCE,
    NOTHING,
    ROWS,
    STEPS,
    TWO,
    Table,
    bias,
    layer,
    weights,
)

MATMULS = Table()
LARGE = {"held": lambda: {"w": torch.empty(1024, 512), "b": torch.empty(1024)}}
for size, shapes, more in (
    ("", (ROWS,), {"held": weights}),
    (", large", ((2048, 512),), LARGE),
):
    for name, other in {
        "addmm": lambda m, x: torch.addmm(m.b, x, m.w.t()),
        "mm": lambda m, x: torch.mm(x, m.w.t()) + m.b,
        "bias first": lambda m, x: m.b + x @ m.w.T,
        "einsum": lambda m, x: torch.einsum("ik,ok->io", x, m.w) + m.b,
        "mT": lambda m, x: torch.matmul(x, m.w.mT) + m.b,
        "in place": lambda m, x: (x @ m.w.T).add_(m.b),
    }.items():
        MATMULS.add(
            f"linear: {name}{size}", lambda m, x: F.linear(x, m.w, m.b), other, *shapes, **more
        )
    MATMULS.add(
        f"linear, relu{size}",
        lambda m, x: F.linear(x, m.w, m.b).relu(),
        lambda m, x: (m.b + x @ m.w.t()).relu(),
        *shapes,
        **more,
    )
for name, other in {
    "matmul": lambda m, x: x @ m.w.T + m.b,
    "einsum": lambda m, x: torch.einsum("btk,ok->bto", x, m.w) + m.b,
    "rows": lambda m, x: F.linear(x.reshape(-1, 40), m.w, m.b).view(*x.shape[:2], 24),
}.items():
    MATMULS.add(
        f"linear of steps: {name}", lambda m, x: F.linear(x, m.w, m.b), other, STEPS, held=weights
    )
    MATMULS.add(
        f"linear of steps, gelu: {name}",
        lambda m, x: F.gelu(F.linear(x, m.w, m.b)),
        lambda m, x, other=other: F.gelu(other(m, x)),
        STEPS,
        held=weights,
        same=INFERENCE,
        why="PyTorch saves the product with its bias or without",
    )
MATMULS.add(
    "tensordot",
    lambda m, x: F.linear(x, m.w),
    lambda m, x: torch.tensordot(x, m.w, dims=([2], [1])),
    STEPS,
    held=weights,
)
BATCHES = ((3, 9, 8), (3, 8, 7))
MATMULS.add("bmm: @", lambda m, x, y: torch.bmm(x, y), lambda m, x, y: x @ y, *BATCHES)
MATMULS.add(
    "bmm: einsum",
    lambda m, x, y: torch.bmm(x, y),
    lambda m, x, y: torch.einsum("bik,bkj->bij", x, y),
    *BATCHES,
)
MATMULS.add(
    "baddbmm",
    lambda m, x, y, z: z + torch.bmm(x, y),
    lambda m, x, y, z: torch.baddbmm(z, x, y),
    *BATCHES,
    (3, 9, 7),
)
MATMULS.add(
    "four dimensions: einsum",
    lambda m, x, y: x @ y,
    lambda m, x, y: torch.einsum("bhik,bhkj->bhij", x, y),
    (2, 3, 9, 8),
    (2, 3, 8, 7),
)
MATMULS.add(
    "outer",
    lambda m, x, y: torch.outer(x, y),
    lambda m, x, y: x[:, None] * y[None, :],
    (9,),
    (7,),
)
MATMULS.add(
    "outer: einsum",
    lambda m, x, y: torch.outer(x, y),
    lambda m, x, y: torch.einsum("i,j->ij", x, y),
    (9,),
    (7,),
)
HEADS = ((2, 3, 9, 8),) * 3
MATMULS.add(
    "attention, scaled",
    lambda m, q, k, v: torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(64), -1) @ v,
    lambda m, q, k, v: torch.softmax(q @ k.mT * 0.125, -1) @ v,
    *HEADS,
)
MATMULS.add(
    "attention: einsum",
    lambda m, q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v,
    lambda m, q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.125, -1), v
    ),
    *HEADS,
)
MATMULS.add(
    "convolution's bias",
    lambda m, x: m.layer(x).relu(),
    lambda m, x: (F.conv2d(x, m.layer.weight) + m.layer.bias[:, None, None]).relu(),
    IMAGES,
    held=layer(lambda: nn.Conv2d(8, 6, 3)),
)
MATMULS.add(
    "convolution's padding",
    lambda m, x: F.conv2d(x, m.layer.weight, padding=1),
    lambda m, x: F.conv2d(x, m.layer.weight, padding="same"),
    IMAGES,
    held=layer(lambda: nn.Conv2d(8, 6, 3)),
)

VIEWS = Table()
for name, other in {
    "view": lambda x: x.view(x.shape[0], -1),
    "reshape": lambda x: x.reshape(x.size(0), -1),
    "nn.Flatten": nn.Flatten(),
}.items():
    VIEWS.add(
        f"flatten: {name}",
        lambda m, x: x.flatten(1).exp(),
        lambda m, x, other=other: other(x).exp(),
        IMAGES,
    )
VIEWS.add("None", lambda m, x: x * m.b.unsqueeze(0), lambda m, x: x * m.b[None], held=bias())
VIEWS.add("no new dimension", lambda m, x: x * m.b, lambda m, x: x * m.b[None], held=bias())
VIEWS.add(
    "dimensions of one",
    lambda m, x: x * m.b[:, None, None],
    lambda m, x: x * m.b.view(-1, 1, 1),
    IMAGES,
    held=bias(8),
)
VIEWS.add("expand_as", lambda m, x: x * m.b, lambda m, x: x * m.b.expand_as(x), held=bias())
VIEWS.add("repeat", lambda m, x: m.b.repeat(x.shape[0], 1) * x, lambda m, x: m.b * x, held=bias())
VIEWS.add(
    "transpose",
    lambda m, x: x.permute(0, 2, 1).softmax(-1),
    lambda m, x: x.transpose(1, 2).softmax(-1),
    STEPS,
)
VIEWS.add("mT", lambda m, x: x.transpose(1, 2).softmax(-1), lambda m, x: x.mT.softmax(-1), STEPS)
VIEWS.add(
    "movedim",
    lambda m, x: x.movedim(1, -1).softmax(-1),
    lambda m, x: x.permute(0, 2, 3, 1).softmax(-1),
    IMAGES,
)
VIEWS.add(
    "split",
    lambda m, x: (lambda a, b: a * b)(*x.chunk(2, -1)),
    lambda m, x: (lambda a, b: a * b)(*x.split(20, -1)),
)
VIEWS.add(
    "narrow",
    lambda m, x: x[:, :20] * x[:, 20:],
    lambda m, x: x.narrow(1, 0, 20) * x.narrow(1, 20, 20),
)
VIEWS.add(
    "unflatten",
    lambda m, x: x[:, :20] * x[:, 20:],
    lambda m, x: (lambda y: y[:, 0] * y[:, 1])(x.unflatten(1, (2, 20))),
    same=NOTHING,
    why="their loops have different axes",
)
VIEWS.add(
    "stack",
    lambda m, x, y: torch.stack([x, y], 1).exp(),
    lambda m, x, y: torch.cat([x.unsqueeze(1), y.unsqueeze(1)], 1).exp(),
    *TWO,
)
VIEWS.add(
    "hstack",
    lambda m, x, y: torch.cat([x, y], 1).exp(),
    lambda m, x, y: torch.hstack([x, y]).exp(),
    *TWO,
)
for name, make in {
    "ConstantPad2d": lambda: nn.ConstantPad2d((1, 1, 2, 2), 0.0),
    "ZeroPad2d": lambda: nn.ZeroPad2d((1, 1, 2, 2)),
}.items():
    VIEWS.add(
        f"pad: {name}",
        lambda m, x: F.pad(x, (1, 1, 2, 2)).exp(),
        lambda m, x: m.layer(x).exp(),
        IMAGES,
        held=layer(make),
    )
VIEWS.add(
    "pad: cat",
    lambda m, x: F.pad(x, (0, 0, 1, 0)).exp(),
    lambda m, x: torch.cat([torch.zeros_like(x[:, :, :1]), x], 2).exp(),
    IMAGES,
    same=FORWARD,
    why="the gradient of cat is a view",
)
VIEWS.add("fliplr", lambda m, x: x.flip(1).exp(), lambda m, x: torch.fliplr(x).exp())
