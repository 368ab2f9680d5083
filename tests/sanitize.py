"""Every kind of kernel under compute-sanitizer: `make sanitize`, on a GPU.

Small models of each kind train once, with PyTorch's caching allocator off, so that each tensor is
an allocation of its own. What the kernels read is copied from the host and what they wrote is
compared there: initcheck then knows what was written although it watches our kernels alone, which
makes it quick. `--part 2/8` runs each eighth case from the second on.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.compile import planning
from fusewright.rewrite import convolutions, matmuls
from fusewright.schedule import tensor_core

# Of the results' norm: TF32's own error with room for long sums of few elements.
FAR = 4e-3


class Applied(nn.Module):
    """A layer and a function of its result."""

    def __init__(self, layer: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = layer, then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


class Residual(nn.Module):
    """An epilogue that reads a whole tensor, and computes something of a channel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(40, 40, 3, padding=1)
        self.variance = nn.Parameter(torch.rand(40, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.layer(x) * torch.rsqrt(self.variance + 1e-3) + x)


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.randn(3, 70, 45))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.right)


@dataclass(frozen=True)
class Case:
    name: str
    model: nn.Module
    shape: tuple[int, ...]
    staged: bool = False
    direct: bool = False
    tf32: bool = True
    rounded: bool = False
    trains: bool = True
    dtype: torch.dtype = torch.float32
    tried: str = ""
    infinite: bool = False


def of_matmuls() -> Iterator[Case]:
    linear = nn.Sequential(nn.Linear(130, 75), nn.SiLU())
    yield Case("linear", linear, (45, 130), tf32=False)
    yield Case("linear, infinite", linear, (45, 130), tf32=False, infinite=True, trains=False)
    yield Case("linear, shared", nn.Sequential(nn.Linear(1100, 75), nn.SiLU()), (45, 1100))
    yield Case("linear, unaligned", nn.Sequential(nn.Linear(131, 77), nn.SiLU()), (33, 131))
    yield Case(
        "linear, rounded", nn.Sequential(nn.Linear(130, 75), nn.SiLU()), (45, 130), rounded=True
    )
    yield Case("batches", Batched(), (3, 50, 70), tf32=False)
    sums = Applied(nn.Linear(96, 72), lambda y: F.silu(y).sum(0))
    yield Case("linear, reduced", sums, (50, 96), tf32=False, tried="fused_reductions")
    norm = nn.Sequential(nn.Linear(96, 72), nn.BatchNorm1d(72), nn.SiLU())
    yield Case("linear, batch norm", norm, (50, 96), tf32=False, tried="fused_reductions")
    half = nn.Sequential(nn.Linear(128, 72), nn.SiLU())
    yield Case("linear, bfloat16", half, (50, 128), dtype=torch.bfloat16, tried="half_matmuls")


def of_convolutions() -> Iterator[Case]:
    same = nn.Sequential(nn.Conv2d(40, 70, 3, padding=1), nn.SiLU())
    for tf32, staged in ((False, False), (True, False), (True, True)):
        yield Case(f"3x3, {tf32=}, {staged=}", same, (3, 40, 14, 13), staged=staged, tf32=tf32)
    yield Case("infinite", same, (3, 40, 14, 13), infinite=True, trains=False)
    groups = nn.Sequential(nn.Conv2d(64, 48, 3, stride=2, groups=2), nn.SiLU())
    yield Case("groups, stride 2", groups, (2, 64, 15, 16), staged=True)
    thin = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.SiLU())
    yield Case("thin", thin, (2, 3, 20, 21), direct=True)
    for stride in (1, 2):
        planes = nn.Conv2d(24, 24, 3, stride=stride, padding=1, groups=24, bias=False)
        normed = nn.Sequential(planes, nn.BatchNorm2d(24), nn.ReLU6())
        yield Case(f"planes, {stride=}", normed, (3, 24, 22, 21), direct=True)
    yield Case("residual", Residual(), (3, 40, 14, 13))
    for staged in (False, True):
        woven = nn.ConvTranspose2d(40, 24, 3, stride=2, padding=1, output_padding=1)
        yield Case(
            f"woven, {staged=}", nn.Sequential(woven, nn.SiLU()), (2, 40, 13, 14), staged=staged
        )
        pooled = Applied(nn.Conv2d(40, 24, 3, padding=1), lambda y: F.silu(y).mean((2, 3)))
        yield Case(f"mean, {staged=}", pooled, (3, 40, 14, 13), staged=staged, trains=False)
        largest = Applied(nn.Conv2d(40, 24, 3, padding=1), lambda y: F.silu(y).amax(1))
        yield Case(f"largest, {staged=}", largest, (3, 40, 14, 13), staged=staged, trains=False)


def of_volumes() -> Iterator[Case]:
    for tf32, staged in ((False, False), (True, False), (True, True)):
        cube = nn.Sequential(nn.Conv3d(24, 40, 3, padding=1), nn.SiLU())
        yield Case(f"3x3x3, {tf32=}, {staged=}", cube, (2, 24, 5, 9, 10), staged=staged, tf32=tf32)
    strided = nn.Sequential(nn.Conv3d(20, 24, (2, 3, 3), stride=(1, 2, 1), padding=1), nn.SiLU())
    yield Case("strided volume", strided, (2, 20, 5, 9, 10), staged=True)
    turned = nn.ConvTranspose3d(40, 24, 3, stride=2, padding=1, output_padding=1)
    yield Case("woven volume", nn.Sequential(turned, nn.SiLU()), (2, 40, 4, 6, 7))
    thin = nn.Sequential(nn.Conv3d(2, 8, 3), nn.SiLU())
    yield Case("thin volume", thin, (2, 2, 6, 12, 13), direct=True)


def of_loops() -> Iterator[Case]:
    yield Case("rows", nn.Sequential(nn.LayerNorm(3000), nn.Softmax(-1)), (7, 3000))
    yield Case("columns", nn.Sequential(nn.BatchNorm2d(5), nn.GELU()), (9, 5, 20, 21))
    yield Case("transposed", Applied(nn.Tanh(), lambda y: y.mT.contiguous()), (3, 70, 45))
    yield Case("logsumexp", Applied(nn.Hardtanh(), lambda y: y.logsumexp(1)), (33, 517))
    yield Case("columns' logsumexp", Applied(nn.Hardtanh(), lambda y: y.logsumexp(0)), (517, 33))
    held = Applied(nn.Hardtanh(), lambda y: y.softmax(1))
    yield Case("held columns", held, (2, 17, 61, 67))
    yield Case("scan", Applied(nn.Hardtanh(), lambda y: y.cumsum(1)), (33, 5170))
    yield Case("columns' scan", Applied(nn.Hardtanh(), lambda y: y.cumsum(1)), (3, 517, 33))
    yield Case("cut scan", Applied(nn.Hardtanh(), lambda y: y.cumsum(1)), (3, 200_000))
    pool = nn.Sequential(nn.SiLU(), nn.MaxPool2d(2))
    yield Case("pool", pool, (2, 3, 16, 18), trains=False)
    yield Case("pool, places", pool, (2, 3, 16, 18))
    odd = nn.Sequential(nn.Hardtanh(), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    yield Case("overlapping pool, places", odd, (2, 3, 17, 19))
    yield Case("half rows", nn.RMSNorm(1000), (9, 1000), dtype=torch.bfloat16)


KINDS = (of_matmuls, of_convolutions, of_volumes, of_loops)


def answer(value: int, *_: object) -> int:
    return value


@contextmanager
def planned(case: Case) -> Iterator[None]:
    """Plan small cases with the kernels of large ones."""
    saved = [(module, name, getattr(module, name)) for module, name in (
        (matmuls, "is_worthwhile"), (planning, "least_size"), (convolutions, "is_worthwhile"),
        (convolutions, "gradient_pays"), (convolutions, "prefers_direct"),
        (tensor_core, "prefers_direct"), (tensor_core, "prefers_staging"),
        (tensor_core, "rounded_from"),
    )]  # fmt: skip
    chosen = {
        "prefers_direct": case.direct, "prefers_staging": case.staged, "least_size": 0,
        "rounded_from": 1 if case.rounded else 1 << 40,
    }  # fmt: skip
    os.environ["FUSEWRIGHT_TRY"] = case.tried
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = case.tf32
    for module, name, _ in saved:
        setattr(module, name, functools.partial(answer, chosen.get(name, True)))
    yield
    for module, name, was in saved:
        setattr(module, name, was)


def results(module: nn.Module, x: Tensor, tangent: Tensor, trains: bool) -> list[Tensor]:
    """Outputs and gradients, on the host."""
    with torch.set_grad_enabled(trains):
        given = x.detach().requires_grad_(trains)
        y = module(given)
        if not trains:
            return [y.cpu()]
        y.backward(tangent)
    parameters = [each.grad for each in module.parameters() if each.grad is not None]
    assert given.grad is not None
    return [each.detach().cpu() for each in (y, given.grad, *parameters)]


def failure(case: Case) -> str | None:
    """What is wrong, against float64 on the host."""
    torch.manual_seed(0)
    model = copy.deepcopy(case.model).to(case.dtype).train(case.trains)
    x = torch.randn(case.shape).to(case.dtype)
    if case.infinite:
        x[0, 1], x[-1, -1] = float("inf"), float("nan")
    exact_model = copy.deepcopy(model).double()
    tangent = torch.randn_like(exact_model(x.double())).to(case.dtype)
    exact = results(exact_model, x.double(), tangent.double(), case.trains)
    with planned(case):
        device = x.cuda()
        mode = "train" if case.trains else "eval"
        fast = fusewright.optimize(model.cuda(), device, modes=(mode,)).train(case.trains)
        mine = results(fast, device, tangent.cuda(), case.trains)
    far = 10 * FAR if case.dtype == torch.bfloat16 else FAR
    for number, (one, other) in enumerate(zip(mine, exact, strict=True)):
        if not torch.equal(one.isfinite(), other.isfinite()):
            return f"result {number} is not finite elsewhere"
        one, other = one.double().nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
        # A gradient whose terms cancel may be zero except for rounding.
        error = float((one - other).norm() / other.norm().clamp(min=1e-2))
        if error > far:
            return f"result {number} is off by {error:.1e}"
    return None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--part", default="1/1", help="such as 2/8")
    part, parts = map(int, options.parse_args().part.split("/"))
    warnings.simplefilter("error", RuntimeWarning)
    torch.manual_seed(0)
    failed = False
    for case in [case for kind in KINDS for case in kind()][part - 1 :: parts]:
        found = failure(case)
        print(case.name, found or "right", sep=": ", flush=True)
        failed |= found is not None
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
