"""Models that are bound by launches: eager, torch.compile, its CUDA graphs, ours, and our graphs.

    python -m benchmarks.launch_bound [--calls 100]

For each model and pass: the time of a call when many follow each other (what a user waits for), and
the host's share of it, which is the time until the call returns. Medians in microseconds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import fusewright

WIDTH, LAYERS = 256, 20
ROUNDS = 5
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model with an input."""

    name: str
    model: nn.Module
    x: Tensor


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.first(x)).view(batch, length, 3, 8, width // 8)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


def cases() -> list[Case]:
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    mlp = nn.Sequential(*layers).cuda()
    return [
        Case("MLP of 20 layers, batch 1", mlp, torch.randn(1, WIDTH, device="cuda")),
        Case("MLP of 20 layers, batch 32", mlp, torch.randn(32, WIDTH, device="cuda")),
        Case("block, batch 1, 64 tokens", Block(WIDTH).cuda(), torch.randn(1, 64, WIDTH).cuda()),
    ]


def subjects(case: Case) -> dict[str, Any]:
    def mine() -> nn.Module:
        return copy.deepcopy(case.model)

    return {
        "eager": mine(),
        "torch.compile": torch.compile(mine()),
        "torch.compile, reduce-overhead": torch.compile(mine(), mode="reduce-overhead"),
        "ours": fusewright.optimize(mine(), case.x),
        "ours, reduce-overhead": fusewright.optimize(mine(), case.x, mode="reduce-overhead"),
    }


def passes(model: nn.Module, x: Tensor) -> dict[str, Call]:
    parameters = list(model.parameters())

    def forward() -> object:
        with torch.no_grad():
            return model(x)

    def training() -> object:
        model(x).sum().backward()
        for each in parameters:
            each.grad = None
        return None

    return {"forward": forward, "training": training}


def times_us(call: Call, calls: int) -> tuple[float, float]:
    """The time of a call among many, and that until it returns when the GPU is idle."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    total = (time.perf_counter() - start) / calls
    host = []
    for _ in range(calls // 10):
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return total * 1e6, median(host) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    calls = parser.parse_args().calls
    began = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for case in cases():
        torch.compiler.reset()
        asked = subjects(case)
        made = {name: passes(model, case.x) for name, model in asked.items()}
        expected = case.model(case.x).detach()
        for stage in ("forward", "training"):
            print(f"\n{case.name}, {stage}: us a call, of which host")
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
            for each in made.values():
                for _ in range(10):
                    result = each[stage]()
                    if isinstance(result, Tensor):
                        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
            for _ in range(ROUNDS):  # in turn, so that all see the same clocks
                for name, each in made.items():
                    found[name].append(times_us(each[stage], calls))
            best = median(total for total, _ in found["torch.compile, reduce-overhead"])
            for name, times in found.items():
                total, host = (median(each) for each in zip(*times, strict=True))
                print(f"  {name:32} {total:8.1f} {host:8.1f}   {best / total:5.2f}x")
        replays = fusewright.explain(asked["ours, reduce-overhead"]).replays
        print("", *replays, sep="\n  ")
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
