"""Loops over long rows and rows of odd length beside PyTorch, under several schedules, in one run.

    python benchmarks/long_rows.py --out long_rows.json [--only softmax] [--compile]

Needs a CUDA GPU, PyTorch and nvcc. The first row of each form has the schedule that `choose` takes.
Kernels are built in parallel. Each result is checked against float64 before it is timed. The share
is of the rate of PyTorch's copy in the same run; bytes are those that a kernel must move.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import loop_kernels
from benchmarks.loops import S0, Case, copy_rate, median_us, prepared
from fusewright.build import build, load
from fusewright.codegen.source import Source
from fusewright.ir.loop import LoopKernel
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.device import target_of
from fusewright.target.target import Target

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
BUILDS = 8  # at once
SLICE = 1 << 27  # elements that are checked in float64 at once


@dataclass(frozen=True)
class Planned:
    """A form before its tensors exist: `make` allocates them, `others` are schedules to try."""

    name: str
    loop: LoopKernel
    batch: int
    make: Callable[[], Tensors]
    output: str
    exact: Callable[[Tensors], Tensor]  # of some rows, in float64
    eager: Callable[[Tensors], object]
    others: tuple[Schedule, ...] = ()


@dataclass(frozen=True)
class Row:
    name: str
    schedule: str
    gb: float
    ours_ms: float
    of_copy: float
    error: float
    eager_ms: float
    eager_error: float
    compiled_ms: float


def rand(*shape: int, dtype: str = "float32") -> Tensor:
    return torch.rand(*shape, device="cuda", dtype=getattr(torch, dtype))


def cluster(
    blocks: int, threads: int, row: int, lanes: int, at_once: int, stays: bool = False
) -> Schedule:
    unroll = -(-row // (blocks * threads * lanes))
    found = Schedule("row", lanes, threads, unroll=unroll, cached=True, cluster=blocks)
    return replace(found, shared=at_once, stays=stays)


def again(lanes: int, threads: int = 512, unroll: int = 4) -> Schedule:
    """Each sweep reads the row."""
    return Schedule("row", lanes, threads, unroll=unroll)


def middle(batch: int, rows: int, columns: int) -> Iterator[Planned]:
    """Reductions over a middle dimension, and the gradient of a mean."""
    others = tuple(
        Schedule("column", 1, 256, across=across, unroll=unroll)
        for across, unroll in ((64, 4), (64, 8))
    )
    shape = f"{batch}x{rows}x{columns}"
    ops: dict[str, tuple[Callable[..., Tensor], ...]] = {
        "sum": (lambda x: x.double().sum(1), lambda x: x.sum(1)),
        "max": (lambda x: x.double().amax(1), lambda x: x.max(1)[0]),
    }
    for kind, (exact, eager) in ops.items():
        yield Planned(
            f"middle_{kind} {shape}",
            loop_kernels.middle_reduction(S0, rows, columns, kind),
            batch,
            lambda: {"x": rand(batch, rows, columns), "y": rand(batch, columns)},
            "y",
            lambda t, exact=exact: exact(t["x"]),
            lambda t, eager=eager: eager(t["x"]),
            others if kind == "sum" else (),
        )
    flat = [Schedule("pointwise", 4, 256, unroll=u, flat=True) for u in (1, 2, 8)]
    yield Planned(
        f"spread_mean {shape}",
        loop_kernels.spread_mean(S0, rows, columns),
        batch,
        lambda: {"g": rand(batch, columns), "y": rand(batch, rows, columns)},
        "y",
        lambda t: (t["g"].double() / rows)[:, None].expand(t["y"].shape),
        lambda t: (t["g"] / rows)[:, None].expand(t["y"].shape).contiguous(),
        (*flat, Schedule("pointwise", 1, 256, unroll=8)),
    )


def middle_of_halves(batch: int, rows: int, columns: int) -> Planned:
    """Two bytes a load: how many must be in flight?"""
    others = [Schedule("column", 1, 256, unroll=unroll) for unroll in (8, 16)]
    return Planned(
        f"middle_sum {batch}x{rows}x{columns} bf16",
        loop_kernels.middle_reduction(S0, rows, columns, "sum", "bfloat16"),
        batch,
        lambda: {
            "x": rand(batch, rows, columns, dtype="bfloat16"),
            "y": rand(batch, columns, dtype="bfloat16"),
        },
        "y",
        lambda t: t["x"].double().sum(1),
        lambda t: t["x"].sum(1),
        tuple(others),
    )


def scaled(rows: int, columns: int, dtype: str = "float32") -> Planned:
    lanes = 16 // getattr(torch, dtype).itemsize
    flat = [Schedule("pointwise", lanes, 256, unroll=u, flat=True) for u in (1, 4)]
    return Planned(
        f"scaled_rows {rows}x{columns} {dtype}",
        loop_kernels.scaled_rows(S0, columns, dtype),
        rows,
        lambda: {
            "x": rand(rows, columns, dtype=dtype),
            "by": rand(rows, dtype=dtype),
            "b": rand(columns, dtype=dtype),
            "y": rand(rows, columns, dtype=dtype),
        },
        "y",
        lambda t: t["x"].double() * t["by"][:, None] + t["b"],
        lambda t: torch.addcmul(t["b"], t["x"], t["by"][:, None]),
        (*flat, Schedule("pointwise", 1, 256, unroll=4)),
    )


def row_norm(rows: int, columns: int, *others: Schedule) -> Planned:
    return Planned(
        f"row_norm {rows}x{columns}",
        loop_kernels.row_norm(S0, columns),
        rows,
        lambda: {"x": rand(rows, columns), "y": rand(rows, columns)},
        "y",
        lambda t: t["x"].double() / t["x"].double().norm(dim=1, keepdim=True),
        lambda t: t["x"] / torch.norm(t["x"], p=2, dim=1, keepdim=True),
        others,
    )


def softmax(rows: int, columns: int, *others: Schedule) -> Planned:
    return Planned(
        f"softmax {rows}x{columns}",
        loop_kernels.softmax(S0, columns),
        rows,
        lambda: {"x": rand(rows, columns), "y": rand(rows, columns)},
        "y",
        lambda t: torch.softmax(t["x"].double(), 1),
        lambda t: torch.softmax(t["x"], 1),
        others,
    )


def softmax_gradient(rows: int, columns: int, *others: Schedule) -> Planned:
    def exact(t: Tensors) -> Tensor:
        y, g = t["y"].double(), t["g"].double()
        return y * (g - (y * g).sum(1, keepdim=True))

    return Planned(
        f"softmax_gradient {rows}x{columns}",
        loop_kernels.softmax_gradient(S0, columns),
        rows,
        lambda: {
            "y": torch.softmax(rand(rows, columns), 1),
            "g": rand(rows, columns),
            "dx": rand(rows, columns),
        },
        "dx",
        exact,
        lambda t: torch.ops.aten._softmax_backward_data(t["g"], t["y"], 1, torch.float32),
        others,
    )


def layer_norm(rows: int, columns: int, *others: Schedule) -> Planned:
    norm = torch.nn.functional.layer_norm
    return Planned(
        f"layer_norm {rows}x{columns}",
        loop_kernels.layer_norm(S0, columns),
        rows,
        lambda: {
            "x": rand(rows, columns),
            "weight": rand(columns),
            "bias": rand(columns),
            "y": rand(rows, columns),
            "mean_out": rand(rows),
            "rstd_out": rand(rows),
        },
        "y",
        lambda t: norm(t["x"].double(), (columns,), t["weight"].double(), t["bias"].double(), 1e-5),
        lambda t: norm(t["x"], (columns,), t["weight"], t["bias"], 1e-5),
        others,
    )


def row_sum(rows: int, columns: int, dtype: str, *others: Schedule) -> Planned:
    return Planned(
        f"row_sum {rows}x{columns} {dtype}",
        loop_kernels.row_sum(S0, columns, dtype),
        rows,
        lambda: {"x": rand(rows, columns, dtype=dtype), "y": rand(rows, dtype=dtype)},
        "y",
        lambda t: t["x"].double().sum(1),
        lambda t: t["x"].sum(1),
        others,
    )


def both(blocks: int, threads: int, row: int, lanes: int, at_once: int) -> tuple[Schedule, ...]:
    """Clusters that stay, and such that do not; of rows of any length if these are odd."""
    return tuple(
        replace(cluster(blocks, threads, row, lanes, at_once, stays), flat=row % lanes != 0)
        for stays in (False, True)
    )


def all_forms() -> Iterator[Planned]:
    yield from middle(128, 4096, 4095)
    yield middle_of_halves(128, 4096, 4095)
    yield scaled(32768, 65535)
    yield scaled(32768, 65535, "bfloat16")
    yield row_sum(32768, 65535, "float32", again(1, 512, 8))
    yield row_sum(32768, 65535, "bfloat16", again(1, 256, 16), again(1, 256, 32), again(1, 512, 16))
    yield row_norm(
        32768,
        65535,
        *both(4, 512, 65535, 4, 3),
        *both(2, 1024, 65535, 4, 1),
        cluster(4, 512, 65535, 1, 3),
        again(1, 256, 8),
    )
    yield row_norm(32768, 65536, *both(4, 512, 65536, 4, 3))
    long = 393216
    yield softmax(4096, long, *both(16, 512, long, 4, 2), *both(8, 1024, long, 4, 1), again(4))
    yield softmax(16384, 65536, *both(4, 512, 65536, 4, 3))
    yield softmax(8192, 131071, *both(8, 512, 131071, 4, 3), again(1, 512, 8))
    yield softmax(8192, 40000, *both(4, 512, 40000, 4, 3), *both(4, 256, 40000, 4, 5))
    yield softmax_gradient(4096, long, *both(16, 1024, long, 4, 1))
    yield softmax_gradient(8192, 100000, *both(8, 512, 100000, 4, 1))
    yield layer_norm(8192, 131072, *both(8, 512, 131072, 4, 3), again(4))


def check(form: Planned, tensors: Tensors, got: Tensor) -> float:
    """The largest error, relative to the largest value, slice by slice over the batch."""
    batched = {name: t for name, t in tensors.items() if t.shape[0] == form.batch}
    largest = max(t[0].numel() for t in batched.values())
    rows = max(1, SLICE // largest)
    errors, most = [], 0.0
    for at in range(0, form.batch, rows):
        part = {**tensors, **{name: t[at : at + rows] for name, t in batched.items()}}
        expected = form.exact(part)
        errors.append((got[at : at + rows].double() - expected).abs().max())
        most = max(most, float(expected.abs().max()))
    return float(torch.stack(errors).max()) / most


def short(schedule: Schedule) -> str:
    text = f"{schedule.kind} v{schedule.lanes} t{schedule.threads} u{schedule.unroll}"
    text += f" a{schedule.across}" * (schedule.kind == "column")
    text += " cached" * (schedule.cached and schedule.cluster == 1)
    text += f" b{schedule.beyond}" * (schedule.beyond > 0)
    text += f" x{schedule.splits}" * (schedule.splits > 1)
    text += f" cluster{schedule.cluster} s{schedule.shared}" * (schedule.cluster > 1)
    return text + " flat" * schedule.flat + " stays" * schedule.stays


def schedules(form: Planned, target: Target) -> list[Schedule]:
    first = choose(form.loop, target, {"s0": form.batch})
    wanted = [replace(each, wide_index=first.wide_index) for each in form.others]
    kept = [each for each in wanted if each != first and legal(form.loop, each, target)]
    for each in wanted:
        if each != first and each not in kept:
            print(f"{form.name}: {short(each)} is not legal", file=sys.stderr)
    return [first, *kept]


def measured(
    form: Planned, built: list[tuple[Schedule, Source, object]], rate: float, compiles: bool
) -> Iterator[Row]:
    tensors = form.make()
    case = Case(
        form.name, form.loop, {"s0": form.batch}, tensors, (form.output, form.exact), form.eager
    )
    result = form.eager(tensors)
    assert isinstance(result, Tensor)
    eager_error = check(form, tensors, result)
    del result
    eager = median_us(lambda: form.eager(tensors), 5)
    compiled = float("nan")
    if compiles:
        run = torch.compile(form.eager, dynamic=False)
        compiled = median_us(lambda: run(tensors), 5)
    for schedule, source, library in built:
        tensors[form.output].fill_(float("nan"))
        launch = prepared(case, load(library), source)  # type: ignore[arg-type]
        try:
            launch()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{form.name} {short(schedule)}: {error}", flush=True)
            continue
        error = check(form, tensors, tensors[form.output])
        ours = median_us(launch, 7)
        bytes_moved = case.bytes_moved
        share = bytes_moved / ours / 1e3 / rate
        yield Row(
            form.name,
            short(schedule),
            bytes_moved / 1e9,
            ours / 1e3,
            share,
            error,
            eager / 1e3,
            eager_error,
            compiled / 1e3,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="forms whose name contains this")
    parser.add_argument("--compile", action="store_true", help="time torch.compile, too")
    options = parser.parse_args()
    target = target_of(torch.device("cuda"))
    forms = [each for each in all_forms() if options.only in each.name]
    wanted = [
        (form, each, render([(form.loop, each)], target))
        for form in forms
        for each in schedules(form, target)
    ]
    with ThreadPoolExecutor(BUILDS) as pool:
        libraries = list(pool.map(lambda each: build(each[2], cores=2), wanted))
    rate, _ = copy_rate()
    print(f"{torch.cuda.get_device_name()}: torch copy {rate:.0f} GB/s")
    line = "{:32} {:34} {:>6} {:>8} {:>7} {:>8} {:>8} {:>8} {:>8}"
    heads = ("GB", "ours ms", "of copy", "error", "eager ms", "error", "compiled")
    print(line.format("form", "schedule", *heads), flush=True)
    rows = []
    for form in forms:
        own = [
            (each, source, library)
            for (of, each, source), library in zip(wanted, libraries, strict=True)
            if of is form
        ]
        for row in measured(form, own, rate, options.compile):
            rows.append(row)
            numbers = (f"{row.gb:.2f}", f"{row.ours_ms:.3f}", f"{row.of_copy:.1%}")
            numbers += (f"{row.error:.1e}", f"{row.eager_ms:.3f}", f"{row.eager_error:.1e}")
            print(line.format(row.name, row.schedule, *numbers, f"{row.compiled_ms:.3f}"))
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if options.out:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        report |= {"copy_gb_per_s": rate, "rows": [asdict(each) for each in rows]}
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
