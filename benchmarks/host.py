"""Our CPU kernels beside eager PyTorch and, if requested, torch.compile: whole module calls.

    python benchmarks/host.py [--out host.json] [--only softmax] [--compile] [--budget 1.5]

Candidates take turns in one process on the same threads, each in short bursts after a call that
warms its caches. A time is the lower quartile over bursts. Every round copies the inputs to new
addresses: the memory pages of inputs and outputs change a time by up to a fifth, and eager's
outputs and ours come from different blocks of the heap. Errors are the largest deviation from
float64, divided by the largest magnitude of the result, for eager and for ours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fusewright

N = 1 << 20
ACTIVATIONS = """
exp log tanh sigmoid erf sin cos tan exp2 expm1 log2 log10 log1p atan asin acos sinh cosh asinh
acosh atanh erfc erfinv rsqrt sqrt reciprocal
""".split()
DOUBLES = "exp log tanh sigmoid erf erfc sin cos".split()


class HostCall(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """Microseconds of one call, and errors relative to the largest exact value."""

    name: str
    eager_us: float
    compile_us: float | None
    ours_us: float
    eager_error: float
    ours_error: float

    @property
    def ratio(self) -> float:
        return self.ours_us / self.eager_us


def argument(op: str, n: int, dtype: torch.dtype) -> Tensor:
    """Values of usual size in the function's domain."""
    x = torch.randn(n, dtype=dtype)
    match op:
        case "log" | "log2" | "log10" | "rsqrt" | "sqrt":
            return x.abs() + 1e-3
        case "asin" | "acos" | "atanh" | "erfinv":
            return torch.tanh(x)
        case "acosh":
            return x.abs() + 1
        case "log1p":
            return x.abs()
    return x * 3


def functions() -> Iterator[Case]:
    for op in ACTIVATIONS:
        yield Case(op, getattr(torch, op), (argument(op, N, torch.float32),))
    x, y = torch.randn(N).abs() + 0.1, torch.randn(N)
    yield Case("pow", torch.pow, (x, y))
    yield Case("pow 1.7", lambda a: a**1.7, (x,))
    yield Case("atan2", torch.atan2, (torch.randn(N), y))
    yield Case("hypot", torch.hypot, (torch.randn(N), y))
    for op in DOUBLES:
        yield Case(f"{op} float64", getattr(torch, op), (argument(op, N // 2, torch.float64),))


def activations() -> Iterator[Case]:
    x = torch.randn(N) * 2
    named: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "leaky_relu": F.leaky_relu,
        "elu": F.elu,
        "selu": F.selu,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu tanh": lambda a: F.gelu(a, approximate="tanh"),
        "softplus": F.softplus,
        "mish": F.mish,
        "hardswish": F.hardswish,
        "logsigmoid": F.logsigmoid,
        "softsign": F.softsign,
    }
    for name, function in named.items():
        yield Case(name, function, (x,))


def chains() -> Iterator[Case]:
    """Chains of elementwise operators, as in backward passes and after a bias."""
    x, g = torch.randn(1024, 1024), torch.randn(1024, 1024)
    bias = torch.randn(1024)
    yield Case("bias relu", lambda a, b: torch.relu(a + b), (x, bias))
    yield Case("bias gelu", lambda a, b: F.gelu(a + b), (x, bias))
    yield Case("tanh backward", lambda a, b: b * (1 - a * a), (x, g))
    yield Case("silu backward", silu_backward, (x, g))
    yield Case("adam-like", lambda a, b: a - 1e-3 * b / (torch.sqrt(b * b) + 1e-8), (x, g))


def silu_backward(x: Tensor, g: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return g * s * (1 + x * (1 - s))


def reductions() -> Iterator[Case]:
    for columns in (1024, 4096):
        x = torch.randn((1 << 20) // columns, columns) * 3
        yield Case(f"softmax {columns}", lambda a: torch.softmax(a, -1), (x,))
        yield Case(f"log_softmax {columns}", lambda a: torch.log_softmax(a, -1), (x,))
        weight, bias = torch.randn(columns), torch.randn(columns)
        norm = lambda a, w, b: F.layer_norm(a, w.shape, w, b)  # noqa: E731
        yield Case(f"layer_norm {columns}", norm, (x, weight, bias))
    x = torch.randn(1024, 1024)
    for fill in (-1e9, float("-inf")):
        masked = x.masked_fill(torch.rand(1024, 1024) < 0.3, fill)
        yield Case(f"softmax masked by {fill}", lambda a: torch.softmax(a, -1), (masked,))
    yield Case("column var", lambda a: torch.var(a, 0), (x,))
    yield Case("row var", lambda a: torch.var(a, 1), (x,))
    yield Case("row sum", lambda a: a.sum(1), (x,))
    yield Case("column sum", lambda a: a.sum(0), (x,))
    yield Case("full sum 1M", lambda a: a.sum(), (x,))
    yield Case("full sum 16M", lambda a: a.sum(), (torch.randn(1 << 24),))
    yield Case("row amax", lambda a: a.amax(1), (x,))
    yield Case("square mean", lambda a: (a * a).mean(), (x,))
    images = torch.randn(16, 32, 48, 48)
    yield Case("NCHW channel sum", lambda a: a.sum((0, 2, 3)), (images,))
    yield Case("NCHW channel var", lambda a: torch.var(a, (0, 2, 3)), (images,))


def layouts() -> Iterator[Case]:
    x, y = torch.randn(1024, 1024), torch.randn(1024, 1024)
    for dtype in (torch.float16, torch.bfloat16):
        yield Case(f"add {str(dtype)[6:]}", torch.add, (x.to(dtype), y.to(dtype)))
        yield Case(f"gelu {str(dtype)[6:]}", F.gelu, (x.to(dtype),))
    yield Case("add float32", torch.add, (x, y))
    yield Case("add transposed", torch.add, (x, y.t()))
    yield Case("add strided", torch.add, (x[:, :512], torch.randn(1024, 1024)[:, ::2]))
    yield Case("add broadcast column", torch.add, (x, torch.randn(1024, 1)))
    yield Case("where", torch.where, (x > 0, x, y))


def small() -> Iterator[Case]:
    for n in (1, 32, 1000):
        yield Case(f"gelu of {n}", F.gelu, (torch.randn(n),))
        yield Case(f"sum of {n}", lambda a: a.sum(), (torch.randn(n),))


def all_cases() -> Iterator[Case]:
    for group in (functions, activations, chains, reductions, layouts, small):
        yield from group()


def burst_us(call: Callable[..., object], inputs: tuple[Tensor, ...], repeats: int) -> float:
    """Mean time of a call in a burst, after one call that warms the caches."""
    call(*inputs)
    start = time.perf_counter()
    for _ in range(repeats):
        call(*inputs)
    return (time.perf_counter() - start) / repeats * 1e6


def moved(x: Tensor) -> Tensor:
    """A copy of the tensor in new memory, with the same strides."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).clone()
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def quartiles_us(
    calls: dict[str, Callable[..., object]], inputs: tuple[Tensor, ...], budget_s: float
) -> dict[str, float]:
    """Lower quartiles. All take turns until the budget is spent, in alternating order."""
    once = {name: burst_us(call, inputs, 1) for name, call in calls.items()}
    repeats = {name: max(1, min(500, int(3000 / took))) for name, took in once.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start, round_ = time.perf_counter(), 0
    while time.perf_counter() - start < budget_s or round_ < 5:
        between = torch.zeros(random.randrange(1, 1 << 20))
        inputs = tuple(map(moved, inputs))
        for name in list(calls) if round_ % 2 else list(reversed(calls)):
            samples[name].append(burst_us(calls[name], inputs, repeats[name]))
        del between
        round_ += 1
    # Other jobs on the machine only add time, often to more than half of the bursts.
    return {name: statistics.quantiles(each, n=4)[0] for name, each in samples.items()}


def error(result: Tensor, exact: Tensor) -> float:
    finite = exact.isfinite()
    gap = (result.double() - exact)[finite].abs().max()
    return float(gap / exact[finite].abs().max().clamp(min=1e-30))


def widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def measure(case: Case, budget_s: float, with_compile: bool) -> Row:
    model = HostCall(case.function).eval()
    ours = fusewright.optimize(model, case.inputs, modes=("eval",))
    models: dict[str, Callable[..., object]] = {"eager": model, "ours": ours}
    if with_compile:
        torch._dynamo.reset()
        models["compile"] = torch.compile(model)
    with torch.no_grad():
        exact = case.function(*map(widened, case.inputs))
        errors = {name: error(models[name](*case.inputs), exact) for name in ("eager", "ours")}
        took = quartiles_us(models, case.inputs, budget_s)
    return Row(
        case.name, took["eager"], took.get("compile"), took["ours"], errors["eager"], errors["ours"]
    )


def show(row: Row) -> None:
    if row.compile_us is None:
        beside = f"{'':>9} {'':>7}"
    else:
        beside = f"{row.compile_us:9.1f} {row.ours_us / row.compile_us:7.2f}"
    print(
        f"{row.name:22} {row.eager_us:9.1f} {beside} {row.ours_us:9.1f} {row.ratio:7.2f} "
        f"{row.eager_error:9.1e} {row.ours_error:9.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile (slow)")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timing per case")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    head = ("case", "eager us", "compile", "x", "ours", "x eager", "error", "ours")
    print("{:22} {:>9} {:>9} {:>7} {:>9} {:>7} {:>9} {:>9}".format(*head))
    rows = []
    for case in all_cases():
        if options.only in case.name:
            rows.append(measure(case, options.budget, options.compile))
            show(rows[-1])
    slow = [row.name for row in rows if row.ratio > 1]
    print(f"{len(rows)} cases; slower than eager: {', '.join(slow) or 'none'}")
    if options.out:
        report = {"torch": torch.__version__, "threads": options.threads}
        cases = [{**asdict(row), "ratio": row.ratio} for row in rows]
        options.out.write_text(json.dumps({**report, "rows": cases}, indent=1))


if __name__ == "__main__":
    main()
