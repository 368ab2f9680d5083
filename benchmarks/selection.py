"""Classification losses, argmax and max: eager, torch.compile and ours, in one run.

    python benchmarks/selection.py [--only cross] [--no-compile]

Times come from `interleaved`: of the forward call without gradients and, if the function is
differentiable, of the forward call with its gradients. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fusewright
from benchmarks.host import HostCall
from benchmarks.interleaved import interleaved
from fusewright.bench.clock import DeviceClock


def scores(*shape: int) -> tuple[Tensor, Tensor]:
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device="cuda")
    return torch.randn(shape, device="cuda"), target


def randn(*shape: int) -> tuple[Tensor]:
    return (torch.randn(shape, device="cuda"),)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "cross entropy, 4096 of 1000": (F.cross_entropy, partial(scores, 4096, 1000)),
    "cross entropy, 4096 of 50257": (F.cross_entropy, partial(scores, 4096, 50257)),
    "cross entropy, 32768 of 10": (F.cross_entropy, partial(scores, 32768, 10)),
    "cross entropy, images 16×21×256²": (F.cross_entropy, partial(scores, 16, 21, 256, 256)),
    "smoothed, 8192 of 8192": (
        partial(F.cross_entropy, label_smoothing=0.1),
        partial(scores, 8192, 8192),
    ),
    "argmax, rows, 16384×4096": (lambda x: x.argmax(1), partial(randn, 16384, 4096)),
    "argmax, columns, 64×2048×1024": (lambda x: x.argmax(1), partial(randn, 64, 2048, 1024)),
    "argmin, rows, 128×262144": (lambda x: x.argmin(1), partial(randn, 128, 262144)),
    "max, rows, 16384×4096": (lambda x: x.max(1)[0], partial(randn, 16384, 4096)),
    "max, columns, 64×2048×1024": (lambda x: x.max(1)[0], partial(randn, 64, 2048, 1024)),
}


def forward(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        model(*args)


def training(model: nn.Module, leaf: Tensor, rest: tuple[Tensor, ...], grad_output: Tensor) -> None:
    torch.autograd.grad(model(leaf, *rest), leaf, grad_output)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("--no-compile", action="store_true")
    given = options.parse_args()
    clock = DeviceClock(torch.device("cuda"))
    for name, (function, make) in CASES.items():
        if given.only not in name:
            continue
        args, model = make(), HostCall(function)
        leaf = args[0].clone().requires_grad_()
        candidates: dict[str, nn.Module] = {"eager": model}
        if not given.no_compile:
            torch.compiler.reset()
            candidates["compile"] = torch.compile(model)
        candidates["ours"] = fusewright.optimize(HostCall(function), (leaf, *args[1:]))
        trains = model(leaf, *args[1:]).requires_grad
        for mode in ("forward", "training") if trains else ("forward",):
            calls: dict[str, Callable[[], object]] = {}
            for at, each in candidates.items():
                calls[at] = partial(forward, each, args)
                if mode == "training":
                    grad_output = torch.ones_like(model(*args))
                    calls[at] = partial(training, each, leaf, args[1:], grad_output)
            took = interleaved(calls, clock)
            words = ", ".join(f"{at} {took[at].device_ms * 1e3:.1f}" for at in candidates)
            print(f"{name}, {mode}, µs: {words}", flush=True)


if __name__ == "__main__":
    main()
