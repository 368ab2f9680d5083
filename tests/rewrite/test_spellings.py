"""Spellings of the same thing give the same plan, on a CPU and on a GPU, forward and backward.

Where two spellings differ in a special value (a tie, an overflow, a NaN) or in rounding, their
graphs stay apart. Then their plans have the same structure: as many kernels, and the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.ir.graph import Program
from fusewright.ir.interpret import interpret
from fusewright.rewrite import rewrite
from fusewright.target.target import Target
from tests.support.on_gpu import captured_for_gpu, on_gpu
from tests.support.plan_content import PARTS, contents, planned, structure

Run = Callable[..., Any]
Shape = tuple[int, ...]
ROWS, IMAGES, STEPS = (6, 40), (3, 8, 10, 12), (3, 5, 40)


class Spelling(nn.Module):
    """A function of the module and its arguments, with the layers and parameters that it uses."""

    def __init__(self, run: Run, held: Mapping[str, Any]) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))

    def forward(self, *args: Tensor) -> Any:
        return self.run(self, *args)


@dataclass(frozen=True)
class Pair:
    """Two spellings. `same` are the graphs whose plans are equal; the others have the same
    structure, because of `why`."""

    name: str
    first: Run
    second: Run
    shapes: tuple[Shape, ...] = (ROWS,)
    held: Callable[[], Mapping[str, Any]] = dict
    same: tuple[str, ...] = PARTS
    why: str = ""


@dataclass
class Table:
    pairs: list[Pair] = field(default_factory=list)

    def add(self, name: str, first: Run, second: Run, *shapes: Shape, **more: Any) -> None:
        self.pairs.append(Pair(name, first, second, shapes or (ROWS,), **more))


FORWARD: tuple[str, ...] = ("inference", "forward")
INFERENCE: tuple[str, ...] = ("inference",)
NOTHING: tuple[str, ...] = ()
TIES = "their gradients differ at a tie"
ROUNDING = "they are rounded differently"
NAN = "they differ for NaN"
OVERFLOW = "one of them overflows earlier"


def bias(size: int = 40) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"b": torch.linspace(-1, 1, size)}


def layer(make: Callable[[], nn.Module]) -> Callable[[], Mapping[str, Any]]:
    def held() -> Mapping[str, Any]:
        torch.manual_seed(4)
        return {"layer": make()}

    return held


def weights() -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"w": torch.randn(24, 40, generator=generator), "b": torch.linspace(-1, 1, 24)}


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
TWO, THREE = (ROWS,) * 2, (ROWS,) * 3
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

TABLES = (
    *(CONSTANTS, COUNTED, ACTIVATIONS, ARITHMETIC, REDUCTIONS),
    *(SOFTMAXES, NORMS, LOSSES, MATMULS, VIEWS),
)
PAIRS = [pair for table in TABLES for pair in table.pairs]


def captured(run: Run, pair: Pair) -> Program:
    model = Spelling(run, pair.held())
    return capture(model, [torch.empty(shape) for shape in pair.shapes], mode="train")


def programs(pair: Pair, device: str) -> list[Program]:
    if device == "host":
        return [captured(run, pair) for run in (pair.first, pair.second)]
    with captured_for_gpu():
        return [on_gpu(captured(run, pair)) for run in (pair.first, pair.second)]


def name_of(pair: Pair) -> str:
    return pair.name


@pytest.mark.sample(3)
@pytest.mark.parametrize("device", ["host", "cuda"])
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_both_spellings_have_one_plan(pair: Pair, device: str) -> None:
    if device == "host" and pair.name in ("max", "min"):
        pytest.skip("PyTorch's max with its index is faster than a loop on a CPU")
    target = Target.host() if device == "host" else Target.cuda()
    first, second = (planned(each, target) for each in programs(pair, device))
    for part, plan in first[1].items():
        assert structure(plan) == structure(second[1][part]), part
    ours, theirs = contents(*first), contents(*second)
    assert not bool(pair.why) or pair.same != PARTS
    for part in pair.same:
        assert ours.get(part) == theirs.get(part), part


SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 0.5, 1.0, -1.0, 6.0, 3.0, -3.0, 1e-40, 3e38)


def arguments(pair: Pair, special: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(shape, generator=generator) * 2 - 0.5 for shape in pair.shapes]
    for x in made if special else ():
        count = min(len(SPECIAL), x.numel())
        order = torch.randperm(len(SPECIAL), generator=generator)[:count]
        x.view(-1)[:count] = torch.tensor(SPECIAL)[order]
    return made


def results(program: Program, pair: Pair, special: bool) -> list[Tensor | None]:
    """Outputs and gradients; in float32 for special values, in float64 for others."""
    args, sizes = arguments(pair, special), program.example_sizes
    state = dict(Spelling(pair.first, pair.held()).state_dict())
    given = [
        args[int(each.path)] if each.kind == "input" else state[each.path]
        for each in program.bindings
    ]
    made = interpret(program.forward, given, sizes, exact=special)
    first = sum(result.kind != "saved" for result in program.results)
    if program.backward is None:
        return list(made[:first])
    generator = torch.Generator().manual_seed(2)
    tangents = [torch.randn(made[at].shape, generator=generator) for at in program.tangents]
    gradients = interpret(program.backward, [*made[first:], *tangents], sizes, exact=special)
    return [*made[:first], *gradients]


@pytest.mark.sample(3)
@pytest.mark.parametrize("pair", [each for each in PAIRS if "large" not in each.name], ids=name_of)
def test_rewriting_keeps_special_values(pair: Pair) -> None:
    """NaN, infinities and signs of zeros stay as they were captured; other values within the
    rounding of a float32 constant."""
    for run in (pair.first, pair.second):
        before = captured(run, pair)
        after = rewrite(before)
        for special in (False, True):
            old, new = (results(each, pair, special) for each in (before, after))
            for mine, theirs in zip(new, old, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None and theirs is not None:
                    same_values(mine, theirs, 1e-3 if special else 3e-7, pair)


def same_values(mine: Tensor, theirs: Tensor, within: float, pair: Pair) -> None:
    torch.testing.assert_close(mine, theirs, rtol=within, atol=within, equal_nan=True)
    zeros = (mine == 0) & (theirs == 0)
    # A matmul adds to zero, so that -0 becomes 0, and the order of two zeros decides a maximum.
    if pair not in MATMULS.pairs and "einsum" not in pair.name and "max" not in pair.name:
        assert torch.equal(mine[zeros].signbit(), theirs[zeros].signbit())


def test_there_are_enough_pairs() -> None:
    assert len(PAIRS) == len({pair.name for pair in PAIRS}) >= 150
    assert sum(pair.same == PARTS for pair in PAIRS) >= 100
