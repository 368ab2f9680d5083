"""Whole networks: eager, torch.compile and ours, evaluation and training, in one run.

    python benchmarks/networks.py [--only vgg16 resnet18] [--no-compile] [--kernels 12]

Times come from `interleaved`. Errors are against float64: that of the output, and the largest of
all gradients. `--kernels` lists the longest GPU kernels of each candidate's call, by the profiler.
The time of a kernel that starts early and waits includes the wait.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fusewright
from benchmarks.convolutions import error
from benchmarks.interleaved import interleaved
from fusewright.bench.clock import DeviceClock

BUILDERS = 8


def normed(channels: int, results: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    given = {"stride": stride, "padding": size // 2, "groups": groups, "bias": False}
    return nn.Sequential(nn.Conv2d(channels, results, size, **given), nn.BatchNorm2d(results))  # type: ignore[arg-type]


class Residual(nn.Module):
    def __init__(self, channels: int, results: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = normed(channels, results, 3, stride), normed(results, results, 3)
        same = stride == 1 and channels == results
        self.short = nn.Identity() if same else normed(channels, results, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.short(x))


class Fire(nn.Module):
    def __init__(self, channels: int, few: int, each: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, few, 1)
        self.one, self.three = nn.Conv2d(few, each, 1), nn.Conv2d(few, each, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class Inverted(nn.Module):
    def __init__(self, channels: int, results: int, stride: int, wider: int) -> None:
        super().__init__()
        inner = channels * wider
        parts = [normed(channels, inner, 1), nn.ReLU6()] if wider > 1 else []
        parts += [normed(inner, inner, 3, stride, groups=inner), nn.ReLU6()]
        self.parts = nn.Sequential(*parts, normed(inner, results, 1))
        self.same = stride == 1 and channels == results

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x) if self.same else self.parts(x)


def resnet(classes: int = 1000) -> nn.Module:
    """ResNet-18's layers."""
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    sizes += [(256, 512, 2), (512, 512, 1)]
    head = [normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*head, *(Residual(*each) for each in sizes), *pooled(512, classes))


def pooled(channels: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def squeezenet(classes: int = 1000) -> nn.Module:
    sizes = [[(96, 16, 64), (128, 16, 64), (128, 32, 128)]]
    sizes += [[(256, 32, 128), (256, 48, 192), (384, 48, 192), (384, 64, 256)], [(512, 64, 256)]]
    parts: list[nn.Module] = [nn.Conv2d(3, 96, 7, 2), nn.ReLU()]
    for each in sizes:
        parts += [nn.MaxPool2d(3, 2, ceil_mode=True), *(Fire(*of) for of in each)]
    last = [nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *last)


def vgg(classes: int = 1000) -> nn.Module:
    """VGG16's convolutions, without dropout."""
    parts: list[nn.Module] = []
    channels = 3
    for results, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [nn.Conv2d(channels, results, 3, padding=1), nn.ReLU()]
            channels = results
        parts.append(nn.MaxPool2d(2))
    dense = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*parts, *dense, nn.Linear(4096, classes))


def mobilenet(classes: int = 1000) -> nn.Module:
    """MobileNetV2's layers."""
    sizes = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1))
    sizes += ((6, 160, 3, 2), (6, 320, 1, 1))
    parts: list[nn.Module] = [normed(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for wider, results, count, stride in sizes:
        for at in range(count):
            parts.append(Inverted(channels, results, stride if at == 0 else 1, wider))
            channels = results
    return nn.Sequential(*parts, normed(320, 1280, 1), nn.ReLU6(), *pooled(1280, classes))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (resnet, (16, 3, 224, 224)),
    "squeezenet": (squeezenet, (16, 3, 224, 224)),
    "vgg16": (vgg, (10, 3, 224, 224)),
    "mobilenet": (mobilenet, (10, 3, 224, 224)),
}


def trained(model: nn.Module, x: Tensor, grad: Tensor) -> None:
    for each in model.parameters():
        each.grad = None
    model(x).backward(grad)


def errors(model: nn.Module, exact: nn.Module, x: Tensor, grad: Tensor) -> str:
    trained(exact, x.double(), grad.double())
    trained(model, x, grad)
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    found = [error(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    with torch.no_grad():
        return f"{error(model(x), exact(x.double())):.1e} {max(found):.1e}"


def kernels_of(call: Callable[[], object], most: int) -> list[str]:
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    took: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for each in seen.events():
        took[each.name] += each.device_time
        count[each.name] += 1
    head = f"      {sum(took.values()):.0f} µs in {sum(count.values())} kernels"
    return [
        head,
        *(f"      {us:8.1f} {count[name]:3d} {name[:110]}" for name, us in took.most_common(most)),
    ]


def built(name: str) -> tuple[str, nn.Module, nn.Module, Tensor]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make().cuda(), torch.randn(shape, device="cuda")
    return name, model, fusewright.optimize(copy.deepcopy(model), x), x


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", default=list(NETWORKS), choices=NETWORKS)
    options.add_argument("--no-compile", action="store_true")
    options.add_argument("--kernels", type=int, default=0)
    given = options.parse_args()
    clock = DeviceClock(torch.device("cuda"))
    with ThreadPoolExecutor(BUILDERS) as pool:
        made = list(pool.map(built, given.only))
    for name, model, fast, x in made:
        candidates = {"eager": model, "ours": fast}
        if not given.no_compile:
            torch.compiler.reset()
            candidates["compile"] = torch.compile(copy.deepcopy(model))
        for mode in ("evaluation", "training"):
            for each in candidates.values():
                each.train(mode == "training")
            calls: dict[str, Callable[[], object]] = {}
            with torch.set_grad_enabled(mode == "training"):
                grad = torch.randn_like(model(x))
                for at, each in candidates.items():
                    run = (
                        partial(trained, each, x, grad) if mode == "training" else partial(each, x)
                    )
                    calls[at] = run
                took = interleaved(calls, clock)
                words = ", ".join(f"{at} {took[at].device_ms:.3f}" for at in candidates)
                print(f"{name} {tuple(x.shape)} {mode}, ms: {words}", flush=True)
                exact = copy.deepcopy(model).double()
                for at, each in candidates.items() if mode == "training" else ():
                    print(f"   {at}: errors {errors(each, exact, x, grad)}", flush=True)
                for at in candidates if given.kernels else ():
                    print(f"   {at}", *kernels_of(calls[at], given.kernels), sep="\n", flush=True)


if __name__ == "__main__":
    main()
