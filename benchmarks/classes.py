"""Classes of models that were behind eager mode or torch.compile, before a change and after it.

    python benchmarks/classes.py [--base CHECKOUT] [--only pool] [--no-compile] [--seconds 110]

Each case is made by a process of its own, for this checkout and for the other one, and all are made
at the same time. Then one process at a time has the GPU. Two times are printed for each candidate:
the GPU's alone, by `interleaved`, and that of a call from an idle GPU until it is done, which
contains the host's time for launches. Errors are against float64, relative and by the norm: of the
output, and the largest among all gradients. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
LOCK = Path(tempfile.gettempdir()) / "fusewright-classes.lock"
IDLE_ROUNDS = 7


class Inception(nn.Module):
    """Four branches of small convolutions, joined."""

    def __init__(self, channels: int, few: int, each: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, each, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, few, 1), nn.Conv2d(few, each, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(channels, few, 1), nn.Conv2d(few, each, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, each, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(128, 256, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)[0]
        return result


def normed(count: int, channels: int) -> nn.Module:
    """Convolutions with batch norms, on small images: the host's launches bound them."""
    parts: list[nn.Module] = []
    for _ in range(count):
        convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        parts += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*parts)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def pointwise(channels: int, results: int) -> Callable[[], nn.Module]:
    return partial(nn.Conv2d, channels, results, 1, bias=False)


CASES: dict[str, Case] = {
    "max pool, line, 8 dilated taps": Case(
        partial(nn.MaxPool1d, 8, stride=1, padding=4, dilation=3), (16, 192, 65536)
    ),
    "max pool, 3×3 dilated": Case(
        partial(nn.MaxPool2d, 3, stride=1, padding=1, dilation=2), (32, 64, 256, 256)
    ),
    "mean pool, 3×3 by 2": Case(partial(nn.AvgPool2d, 3, stride=2, padding=1), (32, 64, 256, 256)),
    "mean pool, 11×11 by 3": Case(partial(nn.AvgPool2d, 11, stride=3), (16, 64, 258, 258)),
    "1×1 convolution, 512²": Case(pointwise(64, 128), (16, 64, 512, 512)),
    "1×1 convolution, 112²": Case(pointwise(128, 128), (32, 128, 112, 112)),
    "1×1 convolution, 28²": Case(pointwise(512, 128), (64, 512, 28, 28)),
    "inception blocks": Case(
        lambda: nn.Sequential(*(Inception(128, 32, 32) for _ in range(8))), (8, 128, 14, 14)
    ),
    "batch norms, 16 blocks": Case(partial(normed, 16, 64), (4, 64, 14, 14)),
    "GRU, 3 layers": Case(Recurrent, (128, 16, 128)),
}


def trained(model: nn.Module, x: Tensor, grad_output: Tensor) -> None:
    x.grad = None
    for each in model.parameters():
        each.grad = None
    model(x).backward(grad_output)


def inferred(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def idle_ms(call: Callable[[], object]) -> float:
    """From an idle GPU until the call's work is done."""
    took = []
    for _ in range(IDLE_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def errors(model: nn.Module, exact: nn.Module, x: Tensor, grad_output: Tensor) -> list[float]:
    """Of the output, and the largest of all gradients."""
    wide = x.detach().double().requires_grad_()
    trained(exact, wide, grad_output.double())
    trained(model, x, grad_output)
    pairs = [(x.grad, wide.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(model.parameters(), exact.parameters(), strict=True)]
    found = [relative(a, b) for a, b in pairs if a is not None and b is not None]
    with torch.no_grad():
        return [relative(model(x), exact(x.double())), max(found)]


@contextmanager
def gpu_alone() -> Iterator[None]:
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def another(case: Case, model: nn.Module) -> nn.Module:
    """An equal model. A copy's recurrent weights would not lie in one piece."""
    made = case.make().cuda()
    made.load_state_dict(model.state_dict())
    return made


def measured(name: str, compiles: bool) -> dict[str, Any]:
    """What one process found: for each pass and candidate, both times; and the errors."""
    import fusewright
    from benchmarks.interleaved import interleaved
    from fusewright.bench.clock import DeviceClock

    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().cuda()
    x = torch.randn(case.shape, device="cuda", requires_grad=True)
    fast = fusewright.optimize(another(case, model), x, modes=("train",), check=False)
    candidates = {"eager": model, "ours": fast}
    if compiles:
        candidates["compile"] = torch.compile(another(case, model))
    with torch.no_grad():
        grad_output = torch.randn_like(model(x))
    for each in candidates.values():
        inferred(each, x)
        trained(each, x, grad_output)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    found: dict[str, Any] = {"name": name, "times": {}}
    with gpu_alone():
        clock = DeviceClock(torch.device("cuda"))
        for mode in ("forward", "training"):
            calls = {
                at: partial(trained, each, x, grad_output)
                if mode == "training"
                else partial(inferred, each, x)
                for at, each in candidates.items()
            }
            took = interleaved(calls, clock)
            found["times"][mode] = {
                at: (took[at].device_ms, idle_ms(calls[at])) for at in candidates
            }
        exact = copy.deepcopy(model).double()
        asked = [(at, candidates[at]) for at in ("eager", "ours")]
        found["errors"] = {at: errors(each, exact, x, grad_output) for at, each in asked}
    return found


def shown(name: str, now: dict[str, Any], base: dict[str, Any] | None) -> None:
    for mode, times in now["times"].items():
        words = [f"{at} {gpu:.3f} / {idle:.3f}" for at, (gpu, idle) in times.items()]
        if base is not None:
            gpu, idle = base["times"][mode]["ours"]
            words.append(f"ours before {gpu:.3f} / {idle:.3f}")
        print(f"{name}, {mode}, ms GPU / from idle: {', '.join(words)}")
    texts = [f"{at} {out:.1e} {grad:.1e}" for at, (out, grad) in now["errors"].items()]
    print(f"   errors of output and gradients: {', '.join(texts)}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--base", type=Path, help="another checkout, for times before a change")
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("--no-compile", action="store_true")
    options.add_argument("--seconds", type=float, default=110.0)
    options.add_argument("--one", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(measured(given.one, not given.no_compile)))
        return
    started = time.monotonic()
    running: dict[tuple[str, bool], subprocess.Popen[str]] = {}
    for name in (each for each in CASES if given.only in each):
        for tree in (ROOT, given.base.resolve()) if given.base else (ROOT,):
            flags = ["--no-compile"] if given.no_compile or tree != ROOT else []
            running[name, tree == ROOT] = subprocess.Popen(
                [sys.executable, __file__, "--one", name, *flags],
                env={**os.environ, "PYTHONPATH": str(tree)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for key, process in running.items():
        try:
            left = max(1.0, given.seconds - (time.monotonic() - started))
            found[key] = json.loads(process.communicate(timeout=left)[0].splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError):
            process.kill()
            process.wait()
    for name, ours in running:
        if ours and (name, True) in found:
            shown(name, found[name, True], found.get((name, False)))
        elif ours:
            print(f"{name}: not finished in {given.seconds:.0f} s")


if __name__ == "__main__":
    main()
