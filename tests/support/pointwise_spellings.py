"""Constants, index expressions, activations and arithmetic, each in two spellings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.spelling import (
    FORWARD,
    INFERENCE,
    NAN,
    NOTHING,
    OVERFLOW,
    ROUNDING,
    STEPS,
    THREE,
    TIES,
    TWO,
    Table,
    bias,
    layer,
)

CONSTANTS = Table()
for name, made in {
    "new_full": lambda x: x.new_full((), 0.5),
    "tensor.to(device)": lambda x: torch.tensor(0.5).to(x.device),
    "tensor(device=)": lambda x: torch.tensor(0.5, device=x.device),
    "as_tensor": lambda x: torch.as_tensor(0.5),
    "scalar_tensor": lambda x: torch.scalar_tensor(0.5),
    "new_tensor": lambda x: x.new_tensor(0.5),
    "full_like": lambda x: torch.full_like(x, 0.5),
    "full": lambda x: torch.full((40,), 0.5, device=x.device),
    "fill_": lambda x: torch.empty_like(x).fill_(0.5),
    "one element": lambda x: torch.tensor([0.5], device=x.device),
    "float64": lambda x: torch.tensor(0.5, dtype=torch.float64),
    "ones · c": lambda x: torch.ones_like(x) * 0.5,
    "new_ones / 2": lambda x: x.new_ones(40) / 2,
    "sqrt": lambda x: torch.sqrt(torch.tensor(0.25)),
    "zeros + c": lambda x: torch.zeros(1, device=x.device) + 0.5,
    "list of equals": lambda x: torch.tensor([0.5] * 40, device=x.device),
    "int tensor / 2": lambda x: torch.tensor(1) / 2,
}.items():
    CONSTANTS.add(
        f"minimum with {name}",
        lambda m, x: torch.min(x, torch.tensor(0.5)),
        lambda m, x, made=made: torch.minimum(x, made(x)),
    )
CONSTANTS.add(
    "minimum, operands exchanged",
    lambda m, x: torch.min(x, torch.tensor(0.5)),
    lambda m, x: torch.minimum(torch.tensor(0.5), x),
)
CONSTANTS.add("x · c", lambda m, x: x * 3.5, lambda m, x: torch.tensor(3.5) * x)
CONSTANTS.add("x + c", lambda m, x: x + 3.5, lambda m, x: torch.tensor(3.5) + x)
CONSTANTS.add("x / c", lambda m, x: x / 3.5, lambda m, x: x / torch.tensor(3.5))
CONSTANTS.add("x · π", lambda m, x: x * math.pi, lambda m, x: x * torch.tensor(math.pi))
CONSTANTS.add(
    "x / √d", lambda m, x: x / math.sqrt(40), lambda m, x: x / torch.sqrt(torch.tensor(40.0))
)
CONSTANTS.add("power by a tensor", lambda m, x: x**2, lambda m, x: x ** torch.tensor(2))
CONSTANTS.add(
    "comparison with a tensor",
    lambda m, x: torch.where(x > 0.5, x, -x),
    lambda m, x: torch.where(x > torch.tensor(0.5), x, -x),
)
CONSTANTS.add(
    "masked_fill",
    lambda m, x: x.masked_fill(x > 0.5, -1.0),
    lambda m, x: torch.where(x > 0.5, torch.tensor(-1.0), x),
    same=FORWARD,
    why="where has a gradient for each side",
)
CONSTANTS.add(
    "where with zeros",
    lambda m, x: torch.where(x > 0.5, x, torch.zeros_like(x)),
    lambda m, x: torch.where(x > 0.5, x, 0.0),
)

COUNTED = Table()
for name, made in {
    "float": lambda x: torch.arange(40, dtype=torch.float32, device=x.device),
    "start, end, step": lambda x: torch.arange(0, 40, 1, device=x.device),
    "of floats": lambda x: torch.arange(0.0, 40.0, 1.0, device=x.device),
    "of a size": lambda x: torch.arange(x.shape[1], device=x.device),
    "linspace": lambda x: torch.linspace(0, 39, 40, device=x.device),
    "list": lambda x: torch.tensor(list(range(40)), device=x.device),
    "arange.to(device)": lambda x: torch.arange(40).to(x.device),
}.items():
    COUNTED.add(
        f"arange: {name}",
        lambda m, x: x + torch.arange(40, device=x.device),
        lambda m, x, made=made: x + made(x),
    )
COUNTED.add(
    "eye",
    lambda m, x: x * torch.eye(5, 40, device=x.device),
    lambda m, x: x * (torch.arange(5)[:, None] == torch.arange(40)).float(),
    STEPS,
)
COUNTED.add(
    "triu of ones",
    lambda m, x: x.masked_fill(torch.triu(torch.ones(5, 40, device=x.device), 1).bool(), -1.0),
    lambda m, x: x.masked_fill(torch.arange(40) > torch.arange(5)[:, None], -1.0),
    STEPS,
)
COUNTED.add(
    "tril of ones",
    lambda m, x: x.masked_fill(torch.tril(torch.ones(5, 40)) == 0, -1.0),
    lambda m, x: x.masked_fill(torch.ones(5, 40, dtype=torch.bool).triu(1), -1.0),
    STEPS,
)
COUNTED.add(
    "triu",
    lambda m, x: torch.triu(x),
    lambda m, x: x.masked_fill(torch.arange(40) < torch.arange(5)[:, None], 0.0),
    STEPS,
)

ACTIVATIONS = Table()
for name, make in {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "softplus": nn.Softplus,
}.items():
    function = getattr(F, name)
    ACTIVATIONS.add(
        f"nn and F: {name}",
        lambda m, x, function=function: function(x),
        lambda m, x: m.layer(x),
        held=layer(make),
    )
for name, other in {
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp(min=0.0)": lambda x: x.clamp(min=0.0),
    "maximum, zeros_like": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "max, tensor": lambda x: torch.max(x, torch.tensor(0.0)),
}.items():
    ACTIVATIONS.add(
        f"relu: {name}",
        lambda m, x: F.relu(x),
        lambda m, x, other=other: other(x),
        same=INFERENCE,
        why=TIES,
    )
ACTIVATIONS.add("relu in place", lambda m, x: F.relu(x * 2), lambda m, x: (x * 2).relu_())
ACTIVATIONS.add(
    "relu: where",
    lambda m, x: F.relu(x),
    lambda m, x: torch.where(x > 0, x, 0.0),
    same=NOTHING,
    why=NAN,
)
ACTIVATIONS.add(
    "relu: mask", lambda m, x: F.relu(x), lambda m, x: x * (x > 0), same=NOTHING, why=NAN
)
ACTIVATIONS.add("clip", lambda m, x: x.clamp(-1, 1), lambda m, x: x.clip(-1, 1))
ACTIVATIONS.add("clamp_max", lambda m, x: x.clamp(max=0.5), lambda m, x: x.clamp_max(0.5))
ACTIVATIONS.add(
    "clamp with tensors",
    lambda m, x: x.clamp(-1, 1),
    lambda m, x: torch.clamp(x, torch.tensor(-1.0), torch.tensor(1.0)),
)
ACTIVATIONS.add(
    "clamp in two steps",
    lambda m, x: x.clamp(-1, 1),
    lambda m, x: x.clamp_min(-1).clamp_max(1),
    same=INFERENCE,
    why="each step has a gradient of its own",
)
ACTIVATIONS.add(
    "clamp and minimum",
    lambda m, x: x.clamp(max=0.5),
    lambda m, x: torch.minimum(x, torch.tensor(0.5)),
    same=INFERENCE,
    why=TIES,
)
ACTIVATIONS.add(
    "clamp and where",
    lambda m, x: x.clamp(max=0.5),
    lambda m, x: torch.where(x < 0.5, x, 0.5),
    same=NOTHING,
    why=NAN,
)
ACTIVATIONS.add(
    "hardtanh", lambda m, x: x.clamp(-1, 1), lambda m, x: F.hardtanh(x), same=INFERENCE, why=TIES
)
ACTIVATIONS.add("relu6: hardtanh", lambda m, x: F.relu6(x), lambda m, x: F.hardtanh(x, 0.0, 6.0))
ACTIVATIONS.add(
    "relu6: clamp", lambda m, x: F.relu6(x), lambda m, x: x.clamp(0, 6), same=INFERENCE, why=TIES
)
ACTIVATIONS.add(
    "silu by hand",
    lambda m, x: F.silu(x),
    lambda m, x: x * torch.sigmoid(x),
    same=FORWARD,
    why=ROUNDING,
)
ACTIVATIONS.add(
    "silu, operands exchanged",
    lambda m, x: x * torch.sigmoid(x),
    lambda m, x: x.sigmoid() * x,
)
ACTIVATIONS.add(
    "silu by exp",
    lambda m, x: F.silu(x),
    lambda m, x: x / (1 + torch.exp(-x)),
    same=FORWARD,
    why=OVERFLOW,
)
ACTIVATIONS.add(
    "sigmoid by exp",
    lambda m, x: x.sigmoid(),
    lambda m, x: 1 / (1 + torch.exp(-x)),
    same=INFERENCE,
    why=OVERFLOW,
)
ACTIVATIONS.add(
    "gelu by hand",
    lambda m, x: F.gelu(x),
    lambda m, x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
    same=FORWARD,
    why=ROUNDING,
)
ACTIVATIONS.add(
    "gelu with a quotient",
    lambda m, x: F.gelu(x),
    lambda m, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    same=NOTHING,
    why=ROUNDING,
)
ACTIVATIONS.add(
    "gelu by tanh",
    lambda m, x: F.gelu(x, approximate="tanh"),
    lambda m, x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    same=FORWARD,
    why=ROUNDING,
)
ACTIVATIONS.add(
    "mish by hand",
    lambda m, x: F.mish(x),
    lambda m, x: x * torch.tanh(F.softplus(x)),
    same=FORWARD,
    why=ROUNDING,
)
ACTIVATIONS.add(
    "hardswish by hand",
    lambda m, x: F.hardswish(x),
    lambda m, x: x * F.relu6(x + 3) / 6,
    same=FORWARD,
    why=TIES,
)
ACTIVATIONS.add(
    "hardsigmoid by hand",
    lambda m, x: F.hardsigmoid(x),
    lambda m, x: F.relu6(x + 3) / 6,
    same=INFERENCE,
    why=TIES,
)
ACTIVATIONS.add(
    "leaky_relu by hand",
    lambda m, x: F.leaky_relu(x, 0.1),
    lambda m, x: torch.where(x > 0, x, x * 0.1),
    same=FORWARD,
    why="where has a gradient for each side",
)
ACTIVATIONS.add(
    "elu by hand",
    lambda m, x: F.elu(x),
    lambda m, x: torch.where(x > 0, x, torch.expm1(x)),
    same=FORWARD,
    why=OVERFLOW,
)
ACTIVATIONS.add(
    "softplus by hand",
    lambda m, x: F.softplus(x),
    lambda m, x: torch.log1p(torch.exp(x)),
    same=NOTHING,
    why=OVERFLOW,
)
ACTIVATIONS.add("softsign", lambda m, x: F.softsign(x), lambda m, x: x / (1 + x.abs()))
ACTIVATIONS.add("tanhshrink", lambda m, x: F.tanhshrink(x), lambda m, x: x - x.tanh())

ARITHMETIC = Table()
for name, other in {
    "pow": lambda x: x.pow(2),
    "square": lambda x: x.square(),
    "**": lambda x: x**2.0,
}.items():
    ARITHMETIC.add(
        f"x · x: {name}",
        lambda m, x: x * x,
        lambda m, x, other=other: other(x),
        same=FORWARD,
        why=OVERFLOW,
    )
ARITHMETIC.add("x³", lambda m, x: x * x * x, lambda m, x: x.pow(3), same=FORWARD, why=ROUNDING)
ARITHMETIC.add("√x", lambda m, x: x.sqrt(), lambda m, x: x.pow(0.5), same=INFERENCE, why=ROUNDING)
ARITHMETIC.add(
    "1/√x", lambda m, x: x.rsqrt(), lambda m, x: x.pow(-0.5), same=INFERENCE, why=ROUNDING
)
ARITHMETIC.add("1/x", lambda m, x: x.reciprocal(), lambda m, x: x**-1, same=INFERENCE, why=ROUNDING)
ARITHMETIC.add("x / 4", lambda m, x: x / 4, lambda m, x: x * 0.25)
ARITHMETIC.add("-x", lambda m, x: -x, lambda m, x: x * -1)
ARITHMETIC.add("x - y", lambda m, x, y: x - y, lambda m, x, y: x + (-y), *TWO)
ARITHMETIC.add("1 - x", lambda m, x: 1 - x, lambda m, x: -x + 1)
ARITHMETIC.add("rsub", lambda m, x: 1 - x, lambda m, x: torch.rsub(x, 1))
ARITHMETIC.add("add alpha", lambda m, x, y: x + 2 * y, lambda m, x, y: x.add(y, alpha=2), *TWO)
ARITHMETIC.add("sub alpha", lambda m, x, y: x - 2 * y, lambda m, x, y: x.sub(y, alpha=2), *TWO)
ARITHMETIC.add(
    "addcmul",
    lambda m, x, y, z: x + y * z,
    lambda m, x, y, z: torch.addcmul(x, y, z),
    *THREE,
)
ARITHMETIC.add(
    "addcdiv",
    lambda m, x, y, z: x + y / z,
    lambda m, x, y, z: torch.addcdiv(x, y, z),
    *THREE,
    same=FORWARD,
    why=ROUNDING,
)
ARITHMETIC.add(
    "lerp",
    lambda m, x, y: x + 0.3 * (y - x),
    lambda m, x, y: torch.lerp(x, y, 0.3),
    *TWO,
    same=FORWARD,
    why=ROUNDING,
)
ARITHMETIC.add("+=", lambda m, x, y: x * 2 + y, lambda m, x, y: (x * 2).add_(y), *TWO)
ARITHMETIC.add("sum exchanged", lambda m, x: x.exp() + m.b, lambda m, x: m.b + x.exp(), held=bias())
ARITHMETIC.add(
    "product exchanged", lambda m, x: x.exp() * m.b, lambda m, x: m.b * x.exp(), held=bias()
)
ARITHMETIC.add("residual", lambda m, x: x + x.tanh(), lambda m, x: x.tanh() + x)
ARITHMETIC.add("copies", lambda m, x: x.exp() + 1, lambda m, x: x.clone().exp().contiguous() + 1)
ARITHMETIC.add(
    "dropout in evaluation",
    lambda m, x: x.exp() * 2,
    lambda m, x: F.dropout(x.exp(), 0.5, training=False) * 2,
)
ARITHMETIC.add(
    "identity", lambda m, x: x.exp() * 2, lambda m, x: m.layer(x.exp()) * 2, held=layer(nn.Identity)
)
