"""Convolutions with reductions in their epilogue, planned, and run on kernels built by g++."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen.source import Source
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.ir.convolution import ConvolutionKernel
from fusewright.ir.epilogue import Reduces
from fusewright.plan.steps import Plan
from fusewright.runtime import tensor_cores
from fusewright.target.target import Target
from tests.support.emulated_modules import (
    INFERRED,
    on_library,
)
from tests.support.tensor_cores_on_host import on_host, with_stand_in

CUDA = Target.cuda(trials=("fused_reductions",))

Forward = Callable[[nn.Module, Tensor], object]


class Layer(nn.Module):
    """A convolution and what follows it."""

    def __init__(
        self, forward: Forward, channels: int = 12, results: int = 8, **how: object
    ) -> None:
        super().__init__()
        how = {"kernel_size": 3, "padding": 1, "bias": forward not in UNBIASED, **how}
        kind = nn.ConvTranspose2d if how.pop("transposed", False) else nn.Conv2d
        self.conv = kind(channels, results, **how)  # type: ignore[arg-type]
        self.batch = nn.BatchNorm2d(results)
        self.group = nn.GroupNorm(2, results)
        self.second = nn.Conv2d(results, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(results, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(results, 1, 1))
        self.follows = forward

    def forward(self, x: Tensor) -> object:
        return self.follows(self, x)


def normed(m: nn.Module, x: Tensor) -> Tensor:
    return F.silu(m.batch(m.conv(x) + m.shift))  # type: ignore[operator]


def two_layers(m: nn.Module, x: Tensor) -> Tensor:
    """Backward reduces the second convolution's input gradient, twice for each channel."""
    return m.second(torch.relu(m.batch(m.conv(x))))  # type: ignore[operator,no-any-return]


def biased(m: nn.Module, x: Tensor) -> Tensor:
    """Backward sums the second convolution's input gradient: it is that of the first bias."""
    return m.second(torch.sigmoid(m.conv(x)))  # type: ignore[operator,no-any-return]


def pooled(m: nn.Module, x: Tensor) -> Tensor:
    return (m.conv(x) * m.scale).mean((2, 3))  # type: ignore[operator,no-any-return]


def largest(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Backward looks for the value that equals the largest, and must find it."""
    y = torch.tanh(m.conv(x))  # type: ignore[operator]
    return F.adaptive_avg_pool2d(y, 1), y.amax((2, 3))


def grouped(m: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(m.group(m.conv(x)))  # type: ignore[operator]


def of_images(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)  # type: ignore[operator]
    return F.layer_norm(y, y.shape[1:])


def instances(m: nn.Module, x: Tensor) -> Tensor:
    return F.instance_norm(m.conv(x)) * m.scale  # type: ignore[operator]


def over_channels(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.conv(x) * m.scale  # type: ignore[operator]
    return y.amax(1), y.mean(1, keepdim=True)


def powers_of_channels(m: nn.Module, x: Tensor) -> Tensor:
    return (m.conv(x) * m.scale).logsumexp(1)  # type: ignore[operator,no-any-return]


def powers_of_space(m: nn.Module, x: Tensor) -> Tensor:
    return torch.sigmoid(m.conv(x)).logsumexp((2, 3))  # type: ignore[operator]


def softmaxed(m: nn.Module, x: Tensor) -> Tensor:
    return m.conv(x).softmax(1)  # type: ignore[operator,no-any-return]


# A norm cancels these biases: their gradients are zero but for rounding.
UNBIASED = (normed, two_layers, of_images, instances)
# Forward function, what its kernel reduces, whether per image, channels reduced together.
CASES: dict[str, tuple[Forward, Reduces, bool, int]] = {
    "batch norm": (normed, Reduces.ACROSS, False, 1),
    "pooled": (pooled, Reduces.ACROSS, True, 1),
    "largest": (largest, Reduces.ACROSS, True, 1),
    "group norm": (grouped, Reduces.ACROSS, True, 4),
    "layer norm": (of_images, Reduces.ACROSS, True, 8),
    "instance norm": (instances, Reduces.ACROSS, True, 1),
    "over channels": (over_channels, Reduces.DOWN, True, 1),
    "softmax": (softmaxed, Reduces.DOWN, True, 1),
    "logsumexp of channels": (powers_of_channels, Reduces.DOWN, True, 1),
    "logsumexp of space": (powers_of_space, Reduces.ACROSS, True, 1),
}
# The input, and the convolution: one image, many in a tile, rows in bands, odd sizes, groups.
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "one image": ((1, 12, 13, 20), {}),
    "small images": ((17, 12, 3, 4), {"kernel_size": 1, "padding": 0}),
    "tiny images": ((40, 12, 1, 2), {"kernel_size": 1, "padding": 0}),
    "bands": ((1, 12, 2, 232), {}),
    "odd, groups": ((2, 12, 6, 9), {"groups": 2}),
    "stride": ((3, 12, 11, 16), {"stride": 2}),
    "many channels": ((2, 12, 3, 8), {"results": 136}),
    "transposed": ((3, 12, 5, 6), {"transposed": True, "stride": 2}),
    "transposed 4x4": ((2, 12, 5, 6), {"transposed": True, "stride": 2, "kernel_size": 4}),
}


def prepared(model: nn.Module, x: Tensor) -> Prepared:
    return prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)


@functools.cache
def prepared_small(follows: Forward) -> Prepared:
    """For tests with the fixture `reduces_small_convolutions`."""
    return prepared(Layer(follows), torch.randn(3, 12, 8, 8))


def convolutions_of(plan: Plan) -> list[ConvolutionKernel]:
    return [step.kernel for step in plan.steps if step.kind == "convolution"]


class Layers(nn.Module):
    """Several layers of one input, side by side."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(layers)
        self.layers = nn.ModuleList(layers.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = [layer(x) for layer in self.layers]
        return tuple(out for each in made for out in (each if isinstance(each, tuple) else (each,)))


def layers(names: Iterable[str], how: Mapping[str, object]) -> Layers:
    kinds = {name: case[0] for name, case in CASES.items()} | {"two": two_layers, "bias": biased}
    torch.manual_seed(0)
    return Layers({name: Layer(kinds[name], **how) for name in names})  # type: ignore[arg-type]


def compare(fast: nn.Module, model: nn.Module, x: Tensor, least: float) -> None:
    """Compare a module on emulated kernels, and eager, with float64."""
    exactly = copy.deepcopy(model).double()
    with torch.no_grad():
        ours, eager, truth = fast(x), model(x), exactly(x.double())
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert mine.shape == theirs.shape
        allowed = max(least, 2.0 * float((theirs.double() - exact).norm() / exact.norm()))
        assert float((mine.double() - exact).norm() / exact.norm()) <= allowed


def emulated(
    model: nn.Module,
    x: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    instead: tuple[str, str] = ("", ""),
) -> nn.Module:
    """The module on its kernels, run by fibers, for calls without gradients."""
    made = emulated_source(model, x, monkeypatch, instead)
    return on_library(model, x, *made, INFERRED)


def emulated_source(
    model: nn.Module,
    x: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    instead: tuple[str, str] = ("", ""),
    reduces: bool = True,
) -> tuple[Prepared, Source]:
    """The source for fibers; a part of its text may be replaced."""
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    found = prepared(model, x)
    mode = found.modes[0]
    kernels = (*convolutions_of(mode.forward), *convolutions_of(mode.backward))
    assert ({each.reduces for each in kernels} != {Reduces.NOTHING}) == reduces
    assert instead[0] in found.source.text
    text = found.source.text.replace(*instead) if instead[0] else found.source.text
    return found, Source("host", on_host(text), found.source.entries)
