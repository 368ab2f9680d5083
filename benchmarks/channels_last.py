"""Errors and times of channels-last convolutions on a GPU, beside eager and NCHW.

    python benchmarks/channels_last.py

Compares ours with eager at the full size of examples/conv2d_min_add_multiply.py: errors against
float64, times, and the longest kernels. Then it prints cuDNN's errors and times in both layouts for
several numbers of channels.
"""

import copy
import itertools
import math
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fusewright
from fusewright.problem.load import load_problem

START = time.perf_counter()
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "conv2d_min_add_multiply.py"


def elapsed() -> str:
    return f"[{time.perf_counter() - START:5.1f} s]"


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def timed(run, repeats: int = 30) -> float:
    """Median of event-timed calls, in ms."""
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))[repeats // 2]


def table(name: str, run) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    print(f"-- {name}: kernels, µs a call")
    rows = sorted(trace.key_averages(), key=lambda row: -row.device_time_total)
    for row in rows[:14]:
        print(f"  {row.device_time_total / 5:9.1f} µs  ×{row.count / 5:<4.1f} {row.key[:110]}")


def everything(model, x, seed) -> list:
    """The output, then the gradients of x and of the parameters."""
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf)
    grads = torch.autograd.grad(y, [leaf, *model.parameters()], seed)
    return [y.detach(), *grads]


def check(eager, ours, x, seed) -> None:
    names = ["output", "x", *(name for name, _ in eager.named_parameters())]
    found, wanted = everything(ours, x, seed), everything(eager, x, seed)
    for name, one, other in zip(names, found, wanted, strict=True):
        relative = error(one, other.double())
        layout = "strides ok"
        if one.stride() != other.stride():
            layout = f"STRIDES {one.stride()} not {other.stride()}"
        verdict = "ok" if relative < 5e-3 else "WRONG"
        print(f"  full size, {name:12} ours against eager {relative:.2e} {verdict} {layout}")
    del found, wanted
    small, part = x[:8], seed[:8]
    exact = everything(copy.deepcopy(eager).double(), small.double(), part.double())
    parts = everything(eager, small, part), everything(ours, small, part)
    for name, truth, one, other in zip(names, exact, *parts, strict=True):
        print(
            f"  8 images, {name:12} against float64: eager {error(one, truth):.3e}, "
            f"ours {error(other, truth):.3e}"
        )


def precision() -> None:
    """Relative error against float64 in both layouts: it shows where cuDNN uses TF32."""
    print("-- convolution 3x3, error against float64 and ms: NCHW | channels-last")
    for rank in (2, 3):
        for cin, cout in ((8, 64), (16, 16), (16, 64), (32, 32), (32, 64), (64, 128), (128, 64)):
            size = (16, cin, 64, 64) if rank == 2 else (4, cin, 16, 32, 32)
            conv = torch.nn.functional.conv2d if rank == 2 else torch.nn.functional.conv3d
            x = torch.randn(size, device="cuda")
            w = torch.randn(cout, cin, *([3] * rank), device="cuda") / math.sqrt(cin * 3**rank)
            exact = conv(x[:1].double(), w.double())
            last = torch.channels_last if rank == 2 else torch.channels_last_3d
            parts = []
            for form in (torch.contiguous_format, last):
                a, b = x.contiguous(memory_format=form), w.contiguous(memory_format=form)
                y = conv(a, b)
                kept = y.is_contiguous(memory_format=form)
                ms = timed(lambda a=a, b=b: conv(a, b), 10)  # noqa: B023
                parts.append(
                    f"{error(y[:1], exact):.1e} {ms:.3f} ms{'' if kept else ' OTHER LAYOUT'}"
                )
            print(f"  {rank}d {cin:4}→{cout:<4} {parts[0]} | {parts[1]}")


def main() -> None:
    problem = load_problem(EXAMPLE)
    torch.manual_seed(0)
    eager = problem.make_model().cuda()
    x = problem.make_inputs()[0].cuda()
    ours = fusewright.optimize(eager, (x,))
    print(elapsed(), "optimized", tuple(x.shape))
    with torch.no_grad():
        seed = torch.randn_like(eager(x))
    check(eager, ours, x, seed)
    print(elapsed(), "checked")
    leaf = x.clone().requires_grad_()

    def forward(model):
        def run() -> None:
            with torch.no_grad():
                model(x)

        return run

    def training(model):
        def run() -> None:
            leaf.grad = None
            model.zero_grad(set_to_none=True)
            model(leaf).backward(seed)

        return run

    for name, maker in (("forward", forward), ("training", training)):
        times = [(timed(maker(ours)), timed(maker(eager))) for _ in range(2)]
        mine, theirs = (min(each) for each in zip(*times, strict=True))
        print(f"{name}: ours {mine:.3f} ms, eager {theirs:.3f} ms")
    floor = x.clone()
    print(
        f"clone of x {timed(lambda: floor.copy_(x)):.3f} ms; of the output "
        f"{timed(lambda: seed.clone()):.3f} ms; x to channels-last by PyTorch "
        f"{timed(lambda: x.contiguous(memory_format=torch.channels_last)):.3f} ms"
    )
    print(elapsed(), "timed")
    table("ours, forward", forward(ours))
    table("ours, training", training(ours))
    table("eager, training", training(eager))
    precision()
    print(elapsed(), "done")


main()
