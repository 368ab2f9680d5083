"""Generated CUDA loops, run without a GPU: g++ and fibers stand in for nvcc and threads.

tests/support/cuda_on_host.py says what this tests and what it cannot.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import loop_kernels
from fusewright.ir.graph import Dim, dim
from fusewright.ir.loop import Apply, Constant, Index, Load, LoopKernel, Reduce, Store
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose
from tests.support import loop_inputs, loop_runs
from tests.support.cuda_on_host import CUDA, chosen, emulated, run
from tests.support.tensors import close, unaligned

S0 = Dim(1, ("s0",))


@pytest.mark.parametrize("n", [0, 1, 3, 127, 1000, 5003])
@pytest.mark.parametrize("shifted", [False, True])
def test_pointwise(n: int, shifted: bool) -> None:
    a, b, y = torch.randn(n), torch.randn(n), torch.full((n,), 9.0)
    a = unaligned(a) if shifted else a
    run(
        loop_kernels.add_relu(S0),
        {"a": a, "b": b, "y": y},
        {"s0": n},
        Schedule("pointwise", 4, unroll=2),
    )
    assert torch.equal(y, torch.relu(a + b))


FLOATS = ("float16", "bfloat16", "float32", "float64")
BIASED = chosen((loop_kernels.bias_relu(S0, 40, dtype) for dtype in FLOATS), s0=33)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_relu(dtype: str) -> None:
    x, b = torch.randn(33, 40).to(getattr(torch, dtype)), torch.randn(40).to(getattr(torch, dtype))
    y = torch.empty_like(x)
    loop = loop_kernels.bias_relu(S0, 40, dtype)
    picked = run(loop, {"x": x, "b": b, "y": y}, {"s0": 33}, among=BIASED)
    assert picked.lanes == 16 // x.element_size()
    close(y, torch.relu(x.double() + b.double()), 1e-2 if x.element_size() == 2 else 1e-6)


COLUMNS = (1, 3, 64, 127, 1000, 1024, 4096, 40_000)
SOFTMAXES = chosen((loop_kernels.softmax(S0, columns) for columns in COLUMNS), s0=5)
# On a GPU without clusters a block holds a part of the longest one.
IN_PART = Schedule("row", 4, 512, unroll=8, cached=True, beyond=2)
SOFTMAXES = (*SOFTMAXES, (SOFTMAXES[-1][0], IN_PART))
READ_AGAIN = tuple((loop, Schedule("row", s.lanes, 128, unroll=2)) for loop, s in SOFTMAXES)


@pytest.mark.parametrize("columns", COLUMNS)
def test_softmax(columns: int) -> None:
    x = torch.randn(5, columns) * 5
    y = torch.empty_like(x)
    at = COLUMNS.index(columns)
    loop, picked = SOFTMAXES[at]
    assert picked.cached and (picked.cluster > 1) == (columns == 40_000)
    for each in (picked, IN_PART) if picked.cluster > 1 else (picked,):
        run(loop, {"x": x, "y": y}, {"s0": 5}, each, SOFTMAXES)
        close(y, torch.softmax(x.double(), 1))
        shifted = unaligned(x)
        run(loop, {"x": shifted, "y": shifted}, {"s0": 5}, each, SOFTMAXES)
        close(shifted, torch.softmax(x.double(), 1))
    y.fill_(9)
    run(loop, {"x": x, "y": y}, {"s0": 5}, READ_AGAIN[at][1], READ_AGAIN)
    close(y, torch.softmax(x.double(), 1))


HALF_DTYPES, HALF_COLUMNS = ("float16", "bfloat16"), (40, 1000, 2048, 20_000)
HALF_SOFTMAXES = chosen(
    (loop_kernels.softmax(S0, columns, dtype) for columns in HALF_COLUMNS for dtype in HALF_DTYPES),
    s0=5,
)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("columns", HALF_COLUMNS)
def test_softmax_in_16_bits(dtype: str, columns: int) -> None:
    """Exponentials are held as float32 even where the row's elements have 16 bits."""
    x = (torch.randn(5, columns) * 5).to(getattr(torch, dtype))
    x[1, 3], x[2] = -torch.inf, -torch.inf
    y = torch.empty_like(x)
    loop = loop_kernels.softmax(S0, columns, dtype)
    picked = run(loop, {"x": x, "y": y}, {"s0": 5}, among=HALF_SOFTMAXES)
    assert picked.cached and picked.lanes == 8 and (picked.shared > 0) == (columns == 20_000)
    exact = torch.softmax(x.double(), 1)
    torch.testing.assert_close(y.double(), exact, rtol=4e-3, atol=1e-6, equal_nan=True)
    if picked.shared:
        for again in (x, unaligned(x)):
            run(loop, {"x": again, "y": again}, {"s0": 5}, among=HALF_SOFTMAXES)
            torch.testing.assert_close(again.double(), exact, rtol=4e-3, atol=1e-6, equal_nan=True)


EXTREMES = tuple(
    (loop, schedule)
    for columns in (1, 37, 520)
    for loop, picked in chosen(
        (loop_kernels.extremes(S0, columns, each) for each in HALF_DTYPES), s0=8
    )
    for schedule in (picked, Schedule("row", picked.lanes, 64, unroll=2, splits=3))
)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("columns", [1, 37, 520])
def test_largest_and_smallest_in_16_bits(dtype: str, columns: int) -> None:
    """Two adjacent elements are compared at once. NaN wins."""
    loop, x = (
        loop_kernels.extremes(S0, columns, dtype),
        loop_inputs.rows_with_extremes(columns, dtype),
    )
    lanes = 8 if columns == 520 else 1
    assert choose(loop, CUDA, {"s0": 8}).lanes == lanes
    for schedule in (None, Schedule("row", lanes, 64, unroll=2, splits=3)):
        most, least = torch.empty(8), torch.empty(8, dtype=x.dtype)
        run(loop, {"x": x, "most": most, "least": least}, {"s0": 8}, schedule, EXTREMES)
        torch.testing.assert_close(most, x.float().amax(1), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(least, x.amin(1), rtol=0, atol=0, equal_nan=True)


def divided(columns: int) -> LoopKernel:
    """Elements by a value of their row, by a constant, and by each other."""
    body = [
        Load("x", "float32", loop_kernels.row_major("x", S0, columns)),
        Load("by", "float32", loop_kernels.access("by", 1, 0)),
        Constant("c", "float32", -1.7),
        Apply("a", "float32", "div", ("x", "by")),
        Apply("b", "float32", "div", ("x", "c")),
        Apply("d", "float32", "div", ("c", "x")),
        Reduce("most", "float32", "max", "a"),
        *(Store(name, "float32", loop_kernels.row_major(name, S0, columns)) for name in "abd"),
        Store("most", "float32", loop_kernels.access("most", 1, 0)),
    ]
    outputs = dict.fromkeys(("a", "b", "d", "most"), "float32")
    inputs = {"x": "float32", "by": "float32"}
    return loop_kernels.kernel("divided", [S0], [columns], inputs, outputs, body)


def test_quotients_have_the_bits_of_a_division() -> None:
    """Forward may divide by a row's value where backward divides by each element's."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-37, 1.0])
    by = torch.cat(
        [special, -special, torch.randn(48), torch.randn(8) * 1e-40, 2.0 - 2**-23 + special]
    )
    x = torch.cat([special, -special, torch.randn(1000) * 1e3, torch.rand(1000) * 1e-25])
    x = x.expand(len(by), len(x)).contiguous()
    out = {name: torch.empty_like(x) for name in "abd"} | {"most": torch.empty(len(by))}
    loop = divided(x.shape[1])
    run(loop, {"x": x, "by": by} | out, {"s0": len(by)})
    c = torch.tensor(-1.7)
    for ours, exact in ((out["a"], x / by[:, None]), (out["b"], x / c), (out["d"], c / x)):
        large = exact.abs() > 2**-100  # below, the last bit may differ
        both_nan = ours.isnan() & exact.isnan()
        same = ours.view(torch.int32) == exact.view(torch.int32)
        assert (same | both_nan | ~large & (exact != 0)).all()
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-37, equal_nan=True)


NORMED = (1, 127, 1024, 2048, 60_000)
LAYER_NORMS = chosen((loop_kernels.layer_norm(S0, columns) for columns in NORMED), s0=5)


@pytest.mark.parametrize("columns", NORMED)
def test_layer_norm(columns: int) -> None:
    x, weight, bias = torch.randn(5, columns) + 3, torch.randn(columns), torch.randn(columns)
    y, mean, rstd = torch.empty_like(x), torch.empty(5), torch.empty(5)
    tensors = {"x": x, "weight": weight, "bias": bias, "y": y, "mean_out": mean, "rstd_out": rstd}
    run(loop_kernels.layer_norm(S0, columns), tensors, {"s0": 5}, among=LAYER_NORMS)
    norm = torch.nn.functional.layer_norm
    close(mean, x.double().mean(1))
    close(y, norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5), 1e-5)


@pytest.mark.parametrize("columns", [72, 1000, 32_768])
def test_layer_norm_of_rows_in_shared_memory(columns: int) -> None:
    """Each thread reads back what it loaded. Weight and bias are loaded late. In place."""
    x = (torch.randn(3, columns) + 3).bfloat16()
    weight, bias = torch.randn(columns).bfloat16(), torch.randn(columns).bfloat16()
    norm = torch.nn.functional.layer_norm
    exact = norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5)
    mean, rstd = torch.empty(3), torch.empty(3)
    tensors = {"x": x, "weight": weight, "bias": bias, "y": x, "mean_out": mean, "rstd_out": rstd}
    means = x.double().mean(1)
    loop = loop_kernels.layer_norm(S0, columns, "bfloat16")
    few = Schedule("row", 8, 64, unroll=2, cached=True, shared=4)
    assert run(loop, tensors, {"s0": 3}, few if columns < 1024 else None).shared
    close(mean, means, 1e-5)
    close(x, exact, 2e-2)


def test_several_operands_are_held_in_shared_memory() -> None:
    """The gradient of a softmax, with factors that the lanes of a vector share."""
    lines = 125
    whole = [loop_kernels.row_major(name, S0, lines, 8) for name in ("y", "g", "dx")]
    body = [
        Load("y", "bfloat16", whole[0]),
        Load("g", "bfloat16", whole[1]),
        Load("factor", "bfloat16", loop_kernels.access("factor", lines, 1, 0)),
        Apply("wide", "float32", "mul", ("y", "factor")),
        Apply("each", "float32", "mul", ("wide", "g")),
        Reduce("total", "float32", "sum", "each"),
        Apply("rest", "float32", "sub", ("g", "total")),
        Apply("dx", "float32", "mul", ("wide", "rest")),
        Store("dx", "bfloat16", whole[2]),
    ]
    inputs = dict.fromkeys(("y", "g", "factor"), "bfloat16")
    loop = loop_kernels.kernel("back", [S0], [lines, 8], inputs, {"dx": "bfloat16"}, body)
    y, g, dx = (torch.randn(3, lines, 8).bfloat16() for _ in range(3))
    factor = torch.randn(3, lines).bfloat16()
    schedule = Schedule("row", 8, 64, unroll=2, cached=True, shared=3)
    run(loop, {"y": y, "g": g, "factor": factor, "dx": dx}, {"s0": 3}, schedule)
    wide = y.double() * factor.double()[:, :, None]
    total = (wide * g.double()).sum((1, 2), keepdim=True)
    close(dx, wide * (g.double() - total), 4e-3)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("row", 2, 32, rows=4, unroll=8, cached=True),
        Schedule("row", 2, 64, unroll=2),
        Schedule("row", 1, 64, unroll=2, splits=3),
    ],
)
def test_mean_and_deviations_of_vectors(schedule: Schedule) -> None:
    """float64 has an accumulator of its own on the GPU; float32 has another on the host."""
    columns = 500
    body = [
        Load("x", "float64", loop_kernels.row_major("x", S0, columns)),
        Reduce("mean", "float64", "welford", "x", "m2"),
        Store("mean", "float64", loop_kernels.access("mean", 1, 0)),
        Store("m2", "float64", loop_kernels.access("m2", 1, 0)),
    ]
    outputs = {"mean": "float64", "m2": "float64"}
    loop = loop_kernels.kernel("spread", [S0], [columns], {"x": "float64"}, outputs, body)
    x = torch.randn(6, columns, dtype=torch.float64)
    x[1] += 1e6
    x[2] = 7.0
    x[3, 9] = torch.nan
    x[4] *= 1e150
    x[5] = 1.7e308
    mean, m2 = torch.empty(6, dtype=torch.float64), torch.empty(6, dtype=torch.float64)
    run(loop, {"x": x, "mean": mean, "m2": m2}, {"s0": 6}, schedule)
    true = (x * 0.5).mean(1) * 2
    true[5] = 1.7e308
    torch.testing.assert_close(mean, true, rtol=1e-13, atol=0, equal_nan=True)
    spread = (x - true[:, None]).square().sum(1)
    torch.testing.assert_close(m2, spread, rtol=1e-9, atol=1e-20, equal_nan=True)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_row_smaller_than_a_register_is_held(loaded: bool) -> None:
    """Elements that need no load, or one 2-byte load for eight lanes."""
    shape = (2500, 8)
    body = [
        Load("slope", "float32", loop_kernels.access("slope", 1, 0, 0)),
        Load("base", "bfloat16", loop_kernels.access("base", 0, int(loaded), 0)),
        Index("place", "float32", (dim(0), dim(8), dim(1))),
        Apply("far", "float32", "mul", ("slope", "place")),
        Apply("x", "float32", "add", ("far", "base")),
        Reduce("most", "float32", "max", "x"),
        Apply("below", "float32", "sub", ("x", "most")),
        Store("below", "bfloat16", loop_kernels.row_major("y", S0, *shape)),
    ]
    inputs = {"slope": "float32", "base": "bfloat16"}
    loop = loop_kernels.kernel("bias", [S0], shape, inputs, {"y": "bfloat16"}, body)
    slope, base = torch.tensor([0.5, -1e-3, 0.0]), torch.randn(shape[0]).bfloat16()
    y = torch.empty(3, *shape, dtype=torch.bfloat16)
    picked = run(loop, {"slope": slope, "base": base, "y": y}, {"s0": 3})
    assert picked.shared and picked.lanes == 8
    x = slope[:, None].double() * torch.arange(20_000) + (
        base.double().repeat_interleave(8) if loaded else base[0].double()
    )
    close(y.flatten(1), x - x.amax(1, keepdim=True), 4e-3)


@pytest.mark.parametrize(("columns", "threads"), [(256, 256), (1024, 512), (1000, 1024)])
def test_two_sums_of_a_row_do_not_share_memory(columns: int, threads: int) -> None:
    """Both have one type. A fast warp may end the second sweep while a slow one reads the first."""
    whole = [loop_kernels.row_major(name, S0, columns) for name in "xy"]
    body = [
        Load("x", "float32", whole[0]),
        Reduce("a", "float32", "sum", "x"),
        Apply("b", "float32", "mul", ("x", "a")),
        Reduce("c", "float32", "sum", "b"),
        Apply("d", "float32", "add", ("b", "c")),
        Store("d", "float32", whole[1]),
    ]
    loop = loop_kernels.kernel("twice", [S0], [columns], {"x": "float32"}, {"y": "float32"}, body)
    x = torch.randn(200, columns)
    y = torch.empty_like(x)
    schedule = Schedule("row", 1, threads, unroll=-(-columns // threads), cached=True)
    run(loop, {"x": x, "y": y}, {"s0": 200}, schedule)
    once = x.double() * x.double().sum(1, keepdim=True)
    close(y, once + once.sum(1, keepdim=True), 1e-2)


def test_occupancy_is_queried_once() -> None:
    x, y = torch.randn(5000), torch.empty(())
    loop, schedule = loop_kernels.full_sum(S0), Schedule("row", 4, 128, unroll=2, splits=40)
    source = emulated(render([(loop, schedule)], CUDA))
    library = loop_runs.compile_source(source, loop_runs.EMULATED)
    for _ in range(3):
        loop_runs.call(library, source, {"x": x, "y": y}, {"s0": 5000}, 0)
    close(y, x.double().sum(), 1e-5)
    assert library.emulated_occupancy_asked() == 1


SUMMED, SPLITS = ((1, 1), (0, 8), (200, 3), (70, 130), (100, 264)), (1, 5)
COLUMN_SUMS = tuple(
    (loop, replace(picked, splits=splits))
    for rows, columns in SUMMED
    for loop, picked in chosen([loop_kernels.column_sum(S0, columns)], s0=max(1, rows))
    for splits in SPLITS
)


@pytest.mark.parametrize(("rows", "columns"), SUMMED)
@pytest.mark.parametrize("splits", SPLITS)
def test_column_sum(rows: int, columns: int, splits: int) -> None:
    z, g = torch.randn(rows, columns), torch.randn(rows, columns)
    dz, db = torch.empty_like(z), torch.full((columns,), 9.0)
    loop = loop_kernels.column_sum(S0, columns)
    schedule = replace(choose(loop, CUDA, {"s0": max(1, rows)}), splits=splits)
    assert schedule.kind == "column" or columns == 1
    run(loop, {"z": z, "g": g, "dz": dz, "db": db}, {"s0": rows}, schedule, COLUMN_SUMS)
    exact = torch.where(z > 0, g, 0)
    assert torch.equal(dz, exact)
    close(db, exact.double().sum(0), 1e-5)
    db.fill_(9)
    run(loop, {"z": z, "g": g, "dz": None, "db": db}, {"s0": rows}, schedule, COLUMN_SUMS)
    close(db, exact.double().sum(0), 1e-5)


@pytest.mark.parametrize("n", [0, 1, 33, 5000])
@pytest.mark.parametrize("splits", [1, 40])
def test_full_sum(n: int, splits: int) -> None:
    x, y = torch.randn(n), torch.empty(())
    schedule = Schedule("row", 4, 128, unroll=2, splits=splits)
    run(loop_kernels.full_sum(S0), {"x": x, "y": y}, {"s0": n * 1}, schedule)
    close(y, x.double().sum(), 1e-5)


@pytest.mark.parametrize("area", [49, 196])
@pytest.mark.parametrize("splits", [1, 3])
def test_channel_sum(area: int, splits: int) -> None:
    x = torch.randn(6, 5, area)
    y, sums = torch.empty_like(x), torch.empty(5)
    schedule = Schedule("row", 4 if area % 4 == 0 else 1, 64, unroll=2, splits=splits)
    run(loop_kernels.channel_sum(S0, 5, area), {"x": x, "y": y, "sums": sums}, {"s0": 6}, schedule)
    assert torch.equal(y, 2 * x)
    close(sums, (2 * x.double()).sum((0, 2)), 1e-5)
