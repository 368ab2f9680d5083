"""Convolution, bias and SiLU: eager, torch.compile and ours, forward and training, in one run.

    python benchmarks/convolutions.py [--out convolutions.json] [--only 3x3] [--no-compile] [--fp32]

Needs a Hopper GPU. Times come from `interleaved`: candidates take turns, the L2 cache is
overwritten before each call, and host time is not counted. The floor is the larger of two times:
reading the input and writing the output once at a copy's bandwidth, and the multiply-adds at the
rate of an fp16 matmul. Both rates are measured here. Errors are against float64: that of the
output, and the largest of all gradients.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fusewright
from benchmarks.interleaved import interleaved
from fusewright.bench.clock import DeviceClock
from fusewright.compile.pipeline import prepare

BUILDERS = 12


@dataclass(frozen=True)
class Shape:
    """A layer and its input. Kernel size, stride and so on are arguments of nn.Conv2d, or of
    nn.Conv3d if `depth` is not 0. `results` is the number of output channels."""

    name: str
    images: int
    channels: int
    results: int
    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    channels_last: bool = False
    transposed: bool = False
    depth: int = 0

    def model(self) -> nn.Module:
        padding = self.dilation * (self.kernel // 2)
        if self.transposed:  # The output is `stride` times as wide as the input.
            padding = (self.kernel - self.stride) // 2
        kinds = (nn.Conv3d, nn.ConvTranspose3d) if self.depth else (nn.Conv2d, nn.ConvTranspose2d)
        layer = kinds[self.transposed](
            self.channels,
            self.results,
            self.kernel,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return nn.Sequential(layer, nn.SiLU()).cuda()

    def input(self) -> Tensor:
        sizes = (self.depth, self.size, self.size) if self.depth else (self.size, self.size)
        x = torch.randn(self.images, self.channels, *sizes, device="cuda")
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x


SHAPES = (
    Shape("1x1 large images", 16, 64, 256, 128, 1),
    Shape("1x1", 64, 256, 64, 56, 1),
    Shape("1x1 many channels", 64, 1024, 256, 14, 1),
    Shape("1x1 small images", 64, 512, 2048, 7, 1),
    Shape("3x3 large images", 32, 64, 128, 128, 3),
    Shape("3x3 very large images", 4, 32, 32, 512, 3),
    Shape("3x3", 64, 64, 64, 56, 3),
    Shape("3x3 middle", 64, 128, 128, 28, 3),
    Shape("3x3 many channels", 64, 256, 256, 14, 3),
    Shape("3x3 small images", 64, 512, 512, 7, 3),
    Shape("3x3 odd size", 32, 64, 96, 57, 3),
    Shape("3x3 one image", 1, 64, 64, 224, 3),
    Shape("3x3 few channels", 64, 3, 64, 224, 3),
    Shape("3x3 eight channels", 64, 8, 64, 128, 3),
    Shape("3x3 sixteen channels", 64, 16, 32, 128, 3),
    Shape("5x5", 32, 64, 64, 56, 5),
    Shape("7x7", 32, 32, 64, 56, 7),
    Shape("7x7 stride 2, few channels", 64, 3, 64, 224, 7, 2),
    Shape("3x3 stride 2", 64, 64, 128, 56, 3, 2),
    Shape("1x1 stride 2", 64, 256, 512, 28, 1, 2),
    Shape("3x3 dilation 2", 32, 128, 128, 56, 3, 1, 2),
    Shape("3x3 groups 2", 32, 128, 128, 56, 3, 1, 1, 2),
    Shape("3x3 groups 32", 32, 128, 128, 56, 3, 1, 1, 32),
    Shape("3x3 depthwise", 64, 128, 128, 56, 3, 1, 1, 128),
    Shape("3x3 channels-last", 64, 64, 64, 56, 3, channels_last=True),
    Shape("transposed 2x2 stride 2", 32, 256, 128, 64, 2, 2, transposed=True),
    Shape("transposed 3x3 stride 2", 32, 128, 64, 64, 3, 2, transposed=True),
    Shape("transposed 4x4 stride 2", 64, 128, 64, 32, 4, 2, transposed=True),
    Shape("transposed 4x4, many channels", 64, 512, 256, 8, 4, 2, transposed=True),
    Shape("transposed 4x4 to an image", 64, 64, 3, 64, 4, 2, transposed=True),
    Shape("1x1 channels-last", 64, 256, 64, 56, 1, channels_last=True),
    Shape("3x3x3", 4, 64, 64, 32, 3, depth=32),
    Shape("3x3x3 few channels", 64, 3, 16, 32, 3, depth=16),
    Shape("3x3x3 large images", 4, 16, 32, 64, 3, depth=32),
    Shape("3x3x3 stride 2", 8, 64, 128, 32, 3, 2, depth=32),
    Shape("transposed 3x3x3 stride 2", 16, 32, 16, 32, 3, 2, transposed=True, depth=16),
    Shape("transposed 4x4x4 stride 2", 16, 32, 64, 16, 4, 2, transposed=True, depth=8),
)


@dataclass
class Row:
    """Milliseconds and errors by candidate. `ours_is` says whose convolution our plan uses."""

    shape: Shape
    ours_is: str
    floor_ms: float
    forward_ms: dict[str, float] = field(default_factory=dict)
    train_ms: dict[str, float] = field(default_factory=dict)
    call_ms: dict[str, float] = field(default_factory=dict)  # host time, forward
    output_error: dict[str, float] = field(default_factory=dict)
    gradient_error: dict[str, float] = field(default_factory=dict)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def trained(model: nn.Module, x: Tensor, grad: Tensor | None) -> list[Tensor]:
    given = x.detach().requires_grad_()
    y = model(given)
    grad = torch.ones_like(y) if grad is None else grad.to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [given, *model.parameters()], grad)]


def rates(clock: DeviceClock) -> tuple[float, float]:
    """Bytes copied, and operations of an fp16 matmul, per millisecond."""
    block = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(block)
    half = torch.randn(4096, 4096, device="cuda").half()
    calls = {"copy": lambda: target.copy_(block), "matmul": lambda: half @ half}
    took = interleaved(calls, clock)
    copied = 2 * 4 * block.numel() / took["copy"].device_ms
    return copied, 2 * 4096**3 / took["matmul"].device_ms


def floor_ms(shape: Shape, x: Tensor, y: Tensor, known: tuple[float, float]) -> float:
    moved = 4 * (x.numel() + y.numel()) / known[0]
    deep, points = shape.channels, y.numel()
    if shape.transposed:
        deep, points = shape.results, x.numel()
    taps = shape.kernel ** (x.dim() - 2)
    return max(moved, 2 * points * (deep // shape.groups) * taps / known[1])


def built(shape: Shape) -> tuple[Shape, nn.Module, nn.Module, Tensor, str]:
    torch.manual_seed(0)
    model, x = shape.model(), shape.input()
    plans = prepare(model, (x,), device=x.device, modes=("train",)).modes[0]
    ours_is = "ours" if any(s.kind == "convolution" for s in plans.inference.steps) else "PyTorch's"
    fast = fusewright.optimize(copy.deepcopy(model), x, modes=("train",))
    return shape, model, fast, x, ours_is


def measured(
    made: tuple[Shape, nn.Module, nn.Module, Tensor, str],
    known: tuple[float, float],
    clock: DeviceClock,
    compiling: bool,
) -> Row:
    shape, model, fast, x, ours_is = made
    candidates = {"eager": model, "ours": fast}
    if compiling:
        torch.compiler.reset()
        candidates["compile"] = torch.compile(copy.deepcopy(model))
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        y = model(x)
    grad = torch.randn_like(y)
    truth = trained(exact, x.double(), grad)
    row = Row(shape, ours_is, floor_ms(shape, x, y, known))
    for name, each in candidates.items():
        found = trained(each, x, grad)
        errors = [error(a, b) for a, b in zip(found, truth, strict=True)]
        row.output_error[name], row.gradient_error[name] = errors[0], max(errors[1:])
    with torch.no_grad():
        forward = interleaved({n: partial(each, x) for n, each in candidates.items()}, clock)
    training = interleaved(
        {name: partial(trained, each, x, grad) for name, each in candidates.items()}, clock
    )
    row.forward_ms.update((name, took.device_ms) for name, took in forward.items())
    row.train_ms.update((name, took.device_ms) for name, took in training.items())
    row.call_ms.update((name, took.call_ms) for name, took in forward.items())
    return row


def ratio(took: Mapping[str, float]) -> float:
    """How many times as fast ours is as the best of the others."""
    return min(ms for name, ms in took.items() if name != "ours") / took["ours"]


def printed(row: Row) -> str:
    names = [name for name in ("eager", "compile", "ours") if name in row.forward_ms]
    forward = " ".join(f"{row.forward_ms[name]:7.3f}" for name in names)
    train = " ".join(f"{row.train_ms[name]:7.3f}" for name in names)
    errors = " ".join(f"{row.output_error[name]:.1e}" for name in names)
    gradients = " ".join(f"{row.gradient_error[name]:.1e}" for name in names)
    head = f"{row.shape.name:28s} {row.ours_is:9s} | {row.floor_ms:6.3f}"
    forward += f" | {ratio(row.forward_ms):5.2f}×"
    train += f" | {ratio(row.train_ms):5.2f}×"
    return f"{head} | {forward} | {train} | {errors} | {gradients}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--only", default="")
    options.add_argument("--no-compile", action="store_true")
    options.add_argument("--fp32", action="store_true", help="without TF32")
    given = options.parse_args()
    torch.backends.cudnn.allow_tf32 = not given.fp32
    shapes = [each for each in SHAPES if given.only in each.name]
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    with ThreadPoolExecutor(BUILDERS) as pool:
        made = list(pool.map(built, shapes))
    clock = DeviceClock(torch.device("cuda", torch.cuda.current_device()))
    known = rates(clock)
    print("shape, whose | floor | forward ms: eager, compile, ours | × | training | × | errors")
    rows = []
    for each in made:
        rows.append(measured(each, known, clock, not given.no_compile))
        print(printed(rows[-1]), flush=True)
    for name, took in (("forward", "forward_ms"), ("training", "train_ms")):
        mean = statistics.geometric_mean(ratio(getattr(row, took)) for row in rows)
        print(f"geometric mean of the ratios, {name}: {mean:.2f}×")
    if given.out:
        given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
