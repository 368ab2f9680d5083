"""Bandwidth of the generated loop kernels beside PyTorch's copy, in one run.

    python benchmarks/loops.py --out loops.json [--only softmax]

Needs a CUDA GPU, PyTorch and nvcc. Each time is the median of CUDA-event timings. The L2 cache is
flushed before every launch. Bytes are those that the kernel must move. Each result is checked
against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import loop_kernels
from fusewright.build import build, find_compiler, load
from fusewright.codegen.source import Source
from fusewright.ir.graph import Dim
from fusewright.ir.loop import LoopKernel
from fusewright.kinds.registry import render
from fusewright.schedule.loops import choose
from fusewright.target.device import target_of
from fusewright.target.target import Target

S0 = Dim(1, ("s0",))
Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """`check` names an output and gives its exact value from the tensors."""

    name: str
    loop: LoopKernel
    sizes: dict[str, int]
    tensors: dict[str, Tensor]
    check: tuple[str, Callable[[dict[str, Tensor]], Tensor]]
    eager: Callable[[dict[str, Tensor]], object]

    @property
    def bytes_moved(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors.values())


@dataclass(frozen=True)
class Row:
    name: str
    schedule: str
    build_s: float
    median_us: float
    gb_per_s: float
    of_copy: float
    eager_us: float
    worst_error: float


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def pointwise_cases() -> Iterator[Case]:
    n = 1 << 27
    a, b = randn(n), randn(n)
    yield Case(
        "add_relu 128M",
        loop_kernels.add_relu(S0),
        {"s0": n},
        {"a": a, "b": b, "y": torch.empty_like(a)},
        ("y", lambda t: torch.relu(t["a"].double() + t["b"].double())),
        lambda t: torch.relu(t["a"] + t["b"]),
    )
    for rows in (1024, 16384):
        x = randn(rows, 8192)
        yield Case(
            f"bias_relu {rows}x8192",
            loop_kernels.bias_relu(S0, 8192),
            {"s0": rows},
            {"x": x, "b": randn(8192), "y": torch.empty_like(x)},
            ("y", lambda t: torch.relu(t["x"].double() + t["b"].double())),
            lambda t: torch.relu(t["x"] + t["b"]),
        )
    x = randn(16384, 8192, dtype=torch.bfloat16)
    yield Case(
        "bias_relu 16384x8192 bf16",
        loop_kernels.bias_relu(S0, 8192, "bfloat16"),
        {"s0": 16384},
        {"x": x, "b": randn(8192).bfloat16(), "y": torch.empty_like(x)},
        ("y", lambda t: torch.relu(t["x"].double() + t["b"].double())),
        lambda t: torch.relu(t["x"] + t["b"]),
    )


def softmax_case(columns: int, dtype: str) -> Case:
    rows = (1 << 27) // columns
    x = randn(rows, columns, dtype=getattr(torch, dtype))
    return Case(
        f"softmax {rows}x{columns} {dtype}",
        loop_kernels.softmax(S0, columns, dtype),
        {"s0": rows},
        {"x": x, "y": torch.empty_like(x)},
        ("y", lambda t: torch.softmax(t["x"].double(), -1)),
        lambda t: torch.softmax(t["x"], -1),
    )


def channel_softmax_gradient_case(batch: int, channels: int, area: int) -> Case:
    g, f, x = (randn(batch, channels, area) for _ in range(3))
    dx = randn(batch, area, channels).transpose(1, 2)
    return Case(
        f"channel_softmax_gradient {batch}x{channels}x{area}",
        loop_kernels.channel_softmax_gradient(S0, channels, area),
        {"s0": batch},
        {"g": g, "f": f, "y": x.softmax(1), "dx": dx},
        ("dx", lambda t: channel_softmax_gradient(*(t[each].double() for each in "gfy"))),
        lambda t: channel_softmax_gradient(t["g"], t["f"], t["y"]),
    )


def channel_softmax_gradient(g: Tensor, f: Tensor, y: Tensor) -> Tensor:
    given = g * f
    return y * (given - (given * y).sum(1, keepdim=True))


def layer_norm_case(columns: int) -> Case:
    rows = (1 << 27) // columns
    x = randn(rows, columns)
    tensors = {"x": x, "weight": randn(columns), "bias": randn(columns), "y": torch.empty_like(x)}
    tensors |= {"mean_out": randn(rows), "rstd_out": randn(rows)}
    norm = torch.nn.functional.layer_norm
    return Case(
        f"layer_norm {rows}x{columns}",
        loop_kernels.layer_norm(S0, columns),
        {"s0": rows},
        tensors,
        (
            "y",
            lambda t: norm(
                t["x"].double(), (columns,), t["weight"].double(), t["bias"].double(), 1e-5
            ),
        ),
        lambda t: norm(t["x"], (columns,), t["weight"], t["bias"], 1e-5),
    )


def reduction_cases() -> Iterator[Case]:
    z, g = randn(16384, 8192), randn(16384, 8192)
    yield Case(
        "column_sum 16384x8192",
        loop_kernels.column_sum(S0, 8192),
        {"s0": 16384},
        {"z": z, "g": g, "dz": torch.empty_like(z), "db": randn(8192)},
        ("db", lambda t: torch.where(t["z"] > 0, t["g"], 0).sum(0, dtype=torch.float64)),
        lambda t: torch.where(t["z"] > 0, t["g"], 0).sum(0),
    )
    n = 1 << 28
    yield Case(
        "full_sum 256M",
        loop_kernels.full_sum(S0),
        {"s0": n},
        {"x": randn(n), "y": randn(1)},
        ("y", lambda t: t["x"].sum(dtype=torch.float64)[None]),
        lambda t: t["x"].sum(),
    )
    x = randn(512, 64, 3136)
    yield Case(
        "channel_sum 512x64x56x56",
        loop_kernels.channel_sum(S0, 64, 3136),
        {"s0": 512},
        {"x": x, "y": torch.empty_like(x), "sums": randn(64)},
        ("sums", lambda t: (2 * t["x"]).sum((0, 2), dtype=torch.float64)),
        lambda t: (2 * t["x"]).sum((0, 2)),
    )
    x = randn(16384, 8192)
    yield Case(
        "column_logsumexp 16384x8192",
        loop_kernels.column_logsumexp(S0, 8192),
        {"s0": 16384},
        {"x": x, "y": randn(8192)},
        ("y", lambda t: t["x"].double().logsumexp(0)),
        lambda t: t["x"].logsumexp(0),
    )
    x = randn(1024, 131072)
    yield Case(
        "row_logsumexp 1024x131072",
        loop_kernels.row_logsumexp(S0, 131072),
        {"s0": 1024},
        {"x": x, "y": randn(1024)},
        ("y", lambda t: t["x"].double().logsumexp(1)),
        lambda t: t["x"].logsumexp(1),
    )


def scan_case(rows: int, columns: int) -> Case:
    x, b = randn(rows, columns), randn(columns)
    return Case(
        f"row_scan {rows}x{columns}",
        loop_kernels.row_scan(S0, columns),
        {"s0": rows},
        {"x": x, "b": b, "y": torch.empty_like(x)},
        ("y", lambda t: (t["x"] + t["x"]).double().cumsum(1) + t["b"]),
        lambda t: (t["x"] + t["x"]).cumsum(1) + t["b"],
    )


def column_scan_case(batch: int, rows: int, columns: int) -> Case:
    x = randn(batch, rows, columns)
    return Case(
        f"column_scan {batch}x{rows}x{columns}",
        loop_kernels.column_scan(S0, rows, columns),
        {"s0": batch},
        {"x": x, "s": torch.empty_like(x), "y": torch.empty_like(x)},
        ("s", lambda t: t["x"].double().cumsum(1)),
        lambda t: t["x"].cumsum(1) - t["x"],
    )


def all_cases() -> Iterator[Callable[[], Case]]:
    """Functions that make the cases, so that only one case holds memory at a time."""
    for at in range(4):
        yield lambda at=at: list(pointwise_cases())[at]
    for columns in (1024, 4096, 16384, 32768):
        yield lambda columns=columns: softmax_case(columns, "float32")
    yield lambda: softmax_case(4096, "bfloat16")
    yield lambda: channel_softmax_gradient_case(16, 64, 32 * 64 * 64)
    for columns in (1024, 4096, 8192):
        yield lambda columns=columns: layer_norm_case(columns)
    for at in range(5):
        yield lambda at=at: list(reduction_cases())[at]
    for rows, columns in ((2048, 8192), (65536, 256), (1, 1 << 24)):
        yield lambda rows=rows, columns=columns: scan_case(rows, columns)
    for shape in ((16, 2048, 512), (1, 65536, 64)):
        yield lambda shape=shape: column_scan_case(*shape)


def median_us(launch: Callable[[], object], repeats: int = 15) -> float:
    """Median time of a launch. Writing 256 MB flushes the L2 cache before each."""
    flush = torch.empty(64 << 20, device="cuda")
    for _ in range(3):
        launch()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def prepared(case: Case, library: ctypes.CDLL, source: Source) -> Callable[[], None]:
    """A launch with little Python overhead: arguments are converted once."""
    entry = source.entries[0]
    given = [ctypes.c_void_p(case.tensors[name].data_ptr()) for name in entry.arguments]
    given += [ctypes.c_int64(case.sizes[name]) for name in entry.symbols]
    room = max(8, entry.workspace.at(case.sizes))
    scratch = torch.empty(room, dtype=torch.uint8, device="cuda")
    given += [ctypes.c_void_p(scratch.data_ptr()), ctypes.c_int(torch.cuda.current_device())]
    given += [ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)]
    function = getattr(library, entry.name)

    def launch(keep: Tensor = scratch) -> None:
        code = function(*given)
        if code:
            raise RuntimeError(f"{entry.name} returned CUDA error {code}")

    return launch


def measure(case: Case, target: Target, copy_gb_per_s: float) -> Row:
    schedule = choose(case.loop, target, case.sizes)
    source = render([(case.loop, schedule)], target)
    built = build(source)
    launch = prepared(case, load(built), source)
    launch()
    name, exact = case.check
    expected = exact(case.tensors)
    error = (case.tensors[name].double() - expected).abs().max() / expected.abs().max()
    del expected
    torch.cuda.empty_cache()
    ours = median_us(launch)
    eager = median_us(lambda: case.eager(case.tensors), 5)
    rate = case.bytes_moved / ours / 1e3
    short = f"{schedule.kind} v{schedule.lanes} t{schedule.threads} u{schedule.unroll}"
    short += f" r{schedule.rows}" * (schedule.rows > 1) + " cached" * schedule.cached
    short += f" b{schedule.beyond}" * (schedule.beyond > 0)
    short += f" s{schedule.splits}" * (schedule.splits > 1)
    fraction = rate / copy_gb_per_s
    return Row(case.name, short, built.seconds, ours, rate, fraction, eager, float(error))


def copy_rate() -> tuple[float, float]:
    """GB/s of PyTorch's copy of 512 MB, reads plus writes, and its time."""
    x = randn(1 << 27)
    y = torch.empty_like(x)
    took = median_us(lambda: y.copy_(x))
    return 2 * x.numel() * 4 / took / 1e3, took


def show(rows: list[Row], copy_gb_per_s: float) -> None:
    print(f"{torch.cuda.get_device_name()}: torch copy {copy_gb_per_s:.0f} GB/s")
    head = ("case", "schedule", "build s", "us", "GB/s", "of copy", "eager us", "error")
    print("{:28} {:36} {:>7} {:>9} {:>7} {:>8} {:>9} {:>9}".format(*head))
    for r in rows:
        print(
            f"{r.name:28} {r.schedule:36} {r.build_s:7.1f} {r.median_us:9.1f} {r.gb_per_s:7.0f} "
            f"{r.of_copy:8.1%} {r.eager_us:9.1f} {r.worst_error:9.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    target = target_of(torch.device("cuda"))
    rate, took = copy_rate()
    rows = []
    for make in all_cases():
        case = make()
        if options.only in case.name:
            rows.append(measure(case, target, rate))
        del case
        torch.cuda.empty_cache()
    show(rows, rate)
    if options.out:
        nvcc = subprocess.run(
            [*find_compiler("cuda"), "--version"], capture_output=True, text=True
        ).stdout
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "nvcc": nvcc}
        report |= {"copy_gb_per_s": rate, "copy_us": took, "rows": [asdict(r) for r in rows]}
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
