"""The elementwise parts of the reference problems: eager, torch.compile and ours, in one run.

    python benchmarks/elementwise.py --out elementwise.json

Each case is a reference problem at full size without its matmul or convolution: the result of that
is an argument instead. Needs a CUDA GPU. Times are medians of CUDA-event timings. All candidates
take turns, and the L2 cache is overwritten before each call.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fusewright


class MinSubtract(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(16384))
        self.constant = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.min(x + self.bias, self.constant) - self.constant


class MinAddMultiply(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_bias = nn.Parameter(torch.randn(128, 1, 1))
        self.bias = nn.Parameter(torch.randn(128, 1, 1))
        self.register_buffer("limit", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        limited = torch.min(x + self.conv_bias, self.limit)
        return (limited + self.bias) * 2.0


class AddRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8192))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bias)


class BatchNormSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(8192)
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        z = (self.bn(x) + self.bias) / 1.5
        return z * torch.sigmoid(z)


CASES: tuple[tuple[str, type[nn.Module], tuple[int, ...]], ...] = (
    ("matmul_min_subtract", MinSubtract, (128, 16384)),
    ("conv2d_min_add_multiply", MinAddMultiply, (128, 128, 126, 126)),
    ("gemm_add_relu", AddRelu, (1024, 8192)),
    ("matmul_batchnorm_bias_divide_swish", BatchNormSwish, (1024, 8192)),
)


def forward(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(x)

    return call


def training(model: nn.Module, x: Tensor) -> Callable[[], object]:
    x = x.clone().requires_grad_()
    grad_output = torch.randn_like(x)
    wanted = [x, *model.parameters()]

    def call() -> object:
        return torch.autograd.grad(model(x), wanted, grad_output)

    return call


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, so that only the kernels are timed, without launch overhead."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    flush = torch.empty(64 << 20, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


def measure(kind: type[nn.Module], shape: tuple[int, ...]) -> dict[str, float]:
    model = kind().cuda()
    x = torch.randn(shape, device="cuda")
    models = {
        "eager": model,
        "compile": torch.compile(copy.deepcopy(model)),
        "ours": fusewright.optimize(copy.deepcopy(model), x),
    }
    calls = {f"{name} forward": replayed(forward(each, x)) for name, each in models.items()}
    calls |= {f"{name} training": replayed(training(each, x)) for name, each in models.items()}
    return medians(calls, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="problems whose name contains this")
    options = parser.parse_args()
    record: dict[str, dict[str, float]] = {}
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; µs, CUDA graphs replayed")
    for name, kind, shape in CASES:
        if options.only not in name:
            continue
        record[name] = found = measure(kind, shape)
        for way in ("forward", "training"):
            eager, compiled, ours = (found[f"{n} {way}"] for n in ("eager", "compile", "ours"))
            print(
                f"{name:36} {way:9} eager {eager:8.1f}  compile {compiled:8.1f}  ours {ours:8.1f}"
                f"  compile/ours {compiled / ours:5.2f}"
            )
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
