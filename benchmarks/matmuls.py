"""Time and error of float32 matmuls in one run: cuBLAS SGEMM, cuBLAS TF32 and ours.

    python benchmarks/matmuls.py [--out matmuls.json] [--only 4096] [--small] [--hard]

Needs a Hopper GPU. Our time is that of the optimized module, with the split into fp16 parts and the
Python code. Each time is a median of CUDA events over consecutive repeats. A third of a second of
the same work comes first, so that the clock settles where the power limit holds it. Errors are
‖y − y64‖/‖y64‖ against float64.

`--hard` compares errors on inputs that are hard to split into fp16 parts. `--small` times small and
odd shapes, where our plan may call PyTorch's matmul. There the calls take turns, the GPU is kept
busy while the host launches (`interleaved`), and the host time of a call is printed as well.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fusewright
from benchmarks.interleaved import Times, interleaved
from fusewright.bench.clock import DeviceClock
from fusewright.rewrite import matmuls

BUILDERS = 12
# The matmuls of a linear layer: output, gradient of the input, gradient of the weight.
LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x·wᵀ": lambda x, w: x @ w.t(),
    "x·w": lambda x, w: x @ w,
    "xᵀ·w": lambda x, w: x.t() @ w,
}
Shape = tuple[str, int, int, int]  # layout, rows, columns, depth
SHAPES: tuple[Shape, ...] = (
    ("x·wᵀ", 4096, 4096, 4096),
    ("x·wᵀ", 8192, 8192, 8192),
    ("x·wᵀ", 1024, 8192, 8192),
    ("x·w", 1024, 8192, 8192),
    ("xᵀ·w", 8192, 8192, 1024),
    ("x·wᵀ", 128, 16384, 16384),
    ("x·w", 128, 16384, 16384),
    ("xᵀ·w", 16384, 16384, 128),
    ("x·wᵀ", 4097, 4097, 4097),
)
SMALL: tuple[Shape, ...] = tuple(
    ("x·wᵀ", rows, columns, depth)
    for rows, columns, depth in (
        *((n, n, n) for n in (1, 16, 64, 127, 128, 256, 512, 1000, 1024, 2048)),
        (1, 4096, 4096),
        (16, 4096, 4096),
        (64, 4096, 4096),
        (512, 1024, 4096),
        (2048, 512, 2048),
        (127, 4097, 1000),
    )
)


class Matmul(nn.Module):
    """A matmul whose right operand is a parameter, as in a linear layer."""

    def __init__(self, layout: str, weight: Tensor) -> None:
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return LAYOUTS[self.layout](x, self.weight)


@dataclass(frozen=True)
class Row:
    """Milliseconds and errors. `call_ms` is 0 if host times were not measured."""

    layout: str
    rows: int
    columns: int
    contracted: int
    sgemm_ms: float
    tf32_ms: float
    ours_ms: float
    ours_tf32_ms: float
    sgemm_error: float
    tf32_error: float
    ours_error: float
    ours_tf32_error: float
    call_ms: tuple[float, float] = (0.0, 0.0)  # host time: eager, ours

    def rate(self, ms: float) -> float:
        """Effective TFLOP/s."""
        return 2e-9 * self.rows * self.columns * self.contracted / ms


def operands(layout: str, rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    x = torch.randn((depth, rows) if layout == "xᵀ·w" else (rows, depth), device="cuda")
    w = torch.randn((columns, depth) if layout == "x·wᵀ" else (depth, columns), device="cuda")
    return x, w


def sustained_ms(call: Callable[[], object], heat_s: float = 0.35) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    calls = 0
    while time.perf_counter() - start < heat_s:
        call()
        calls += 1
        if calls % 4 == 0:
            torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(16)]
    for event in events:
        event.record()
        call()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(events)
    return statistics.median(first.elapsed_time(second) for first, second in pairs)


def relative_error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def built(shape: Shape) -> tuple[Matmul, nn.Module, Tensor]:
    """The layer, our module and an input."""
    x, w = operands(*shape)
    model = Matmul(shape[0], w)
    return model, fusewright.optimize(model, x, modes=("eval",)).eval(), x


def measured(
    shape: Shape, made: tuple[Matmul, nn.Module, Tensor], clock: DeviceClock | None
) -> Row:
    """Times and errors of one shape: interleaved if there is a clock, otherwise sustained."""
    model, ours, x = made
    layout, w = model.layout, model.weight
    exact = LAYOUTS[layout](x.double(), w.double())

    def run(module: nn.Module, tf32: bool) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return module(x)

    calls = {
        (name, tf32): functools.partial(run, module, tf32)
        for name, module in (("PyTorch", model), ("ours", ours))
        for tf32 in (False, True)
    }
    with torch.no_grad():
        errors = [relative_error(call(), exact) for call in calls.values()]
        times = (
            list(interleaved(calls, clock).values())
            if clock
            else [Times(sustained_ms(call), 0.0) for call in calls.values()]
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    return Row(
        *shape, *(each.device_ms for each in times), *errors,
        call_ms=(times[0].call_ms, times[2].call_ms),
    )  # fmt: skip


def hard_inputs(depth: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs [512, depth] that are hard to split into fp16 parts or to sum with truncation."""

    def pair(make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        return make(), make()

    shape = (512, depth)
    normal = lambda: torch.randn(shape, device="cuda")  # noqa: E731
    uniform = lambda: torch.rand(shape, device="cuda")  # noqa: E731
    exponents = lambda low, high, size: torch.exp2(  # noqa: E731
        torch.randint(low, high + 1, size, device="cuda").float()
    )
    signs = 1.0 - 2.0 * (torch.arange(depth, device="cuda") % 2)
    yield "normal", *pair(normal)
    yield "uniform", *pair(uniform)
    yield "entries × 2^±20", *pair(lambda: normal() * exponents(-20, 20, shape))
    yield "rows × 2^±60", *pair(lambda: normal() * exponents(-60, 60, (512, 1)))
    yield "cancelling", uniform() + 1, (uniform() + 1) * signs
    yield "alternating alike", *pair(lambda: (uniform() + 1) * signs)
    yield "constant", *pair(lambda: torch.full(shape, 0.1, device="cuda"))


def print_hard() -> list[dict[str, object]]:
    """Print errors relative to the result and to ‖a‖‖b‖, beside SGEMM's.

    Our kernel runs at every size, also where a plan would call PyTorch.
    """
    matmuls.is_worthwhile = lambda *_: True
    found: list[dict[str, object]] = []
    print(f"{'inputs':20s} {'K':>6s} {'SGEMM':>9s} {'ours':>9s} {'of |a||b|':>9s}")
    for depth in (1, 16, 129, 1024, 8192, 65536):
        for name, x, w in hard_inputs(depth):
            ours = fusewright.optimize(Matmul("x·wᵀ", w), x, modes=("eval",)).eval()
            with torch.no_grad():
                exact, y = x.double() @ w.double().t(), ours(x)
                sgemm = relative_error(x @ w.t(), exact)
            lengths = x.double().norm(dim=1)[:, None] * w.double().norm(dim=1)
            of_lengths = float((y.double() - exact).norm() / lengths.norm())
            mine = relative_error(y, exact)
            print(f"{name:20s} {depth:6d} {sgemm:9.2e} {mine:9.2e} {of_lengths:9.2e}", flush=True)
            found.append(
                {"inputs": name, "K": depth, "sgemm": sgemm, "ours": mine, "of": of_lengths}
            )
    return found


def printed(row: Row) -> str:
    times = (row.sgemm_ms, row.tf32_ms, row.ours_ms, row.ours_tf32_ms)
    text = "  ".join(f"{ms:7.4f} {row.rate(ms):4.0f}" for ms in times)
    ratios = f"×{row.sgemm_ms / row.ours_ms:.2f} ×{row.tf32_ms / row.ours_tf32_ms:.2f}"
    errors = f"{row.sgemm_error:.1e} {row.tf32_error:.1e} {row.ours_error:.1e}"
    calls = "".join(f" {1e3 * ms:4.0f} µs" for ms in row.call_ms if ms)
    head = f"{row.layout:5s} {row.rows:6d} {row.columns:6d} {row.contracted:6d}"
    return f"{head} | {text} | {ratios} | {errors} {row.ours_tf32_error:.1e}{calls}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--only", default="")
    options.add_argument("--small", action="store_true")
    options.add_argument("--hard", action="store_true")
    given = options.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    print(
        "layout   rows columns contracted | ms, TFLOP/s: SGEMM, TF32, ours, ours as TF32 | errors"
    )
    clock = DeviceClock(torch.device("cuda")) if given.small else None
    found: list[dict[str, object]] = []
    shapes = SMALL if given.small else SHAPES
    shapes = tuple(each for each in shapes if given.only in " ".join(map(str, each)))
    with ThreadPoolExecutor(BUILDERS) as pool:
        made = list(pool.map(built, shapes))
    for shape, each in zip(shapes, made, strict=True):
        row = measured(shape, each, clock)
        found.append(asdict(row))
        print(printed(row), flush=True)
    hard = print_hard() if given.hard else []
    if given.out:
        given.out.write_text(json.dumps({"products": found, "hard": hard}, indent=1) + "\n")


if __name__ == "__main__":
    main()
