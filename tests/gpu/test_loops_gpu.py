"""Generated CUDA loops on a GPU against float64, over schedules, sizes and alignments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import loop_kernels
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Apply, Load, Store
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from tests.support import loop_inputs, tensors
from tests.support.loop_runs import run
from tests.support.tensors import unaligned

S0 = Dim(1, ("s0",))
CUDA = Target.cuda()
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-12}


def close(ours: torch.Tensor, exact: torch.Tensor, tolerance: float = 2e-6) -> None:
    tensors.close(ours, exact, tolerance)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize("n", [0, 1, 3, 127, 1000, 1_000_003, 2_000_003])
@pytest.mark.parametrize("shifted", [False, True])
def test_pointwise(n: int, shifted: bool) -> None:
    a, b, y = randn(n), randn(n), randn(n)
    a = unaligned(a) if shifted else a
    run(loop_kernels.add_relu(S0), {"a": a, "b": b, "y": y}, {"s0": n}, CUDA, threads=0)
    assert torch.equal(y, torch.relu(a + b))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (64, 1000), (300, 8192)])
def test_bias_relu(dtype: str, shape: tuple[int, int]) -> None:
    x, b = randn(*shape).to(getattr(torch, dtype)), randn(shape[1]).to(getattr(torch, dtype))
    y = torch.empty_like(x)
    run(loop_kernels.bias_relu(*shape, dtype), {"x": x, "b": b, "y": y}, None, CUDA, threads=0)
    close(y, torch.relu(x.double() + b.double()), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [1, 3, 127, 1000, 1024, 4096, 16384, 32768, 50257])
def test_softmax(dtype: str, columns: int) -> None:
    x = (randn(37, columns) * 5).to(getattr(torch, dtype))
    y = torch.empty_like(x)
    run(loop_kernels.softmax(S0, columns, dtype), {"x": x, "y": y}, {"s0": 37}, CUDA, threads=0)
    close(y, torch.softmax(x.double(), 1), TOLERANCE[dtype])
    shifted = unaligned(x)
    run(loop_kernels.softmax(S0, columns, dtype), {"x": x, "y": x}, {"s0": 37}, CUDA, threads=0)
    assert torch.equal(x, y)
    run(
        loop_kernels.softmax(S0, columns, dtype),
        {"x": shifted, "y": y},
        {"s0": 37},
        CUDA,
        threads=0,
    )
    close(y, torch.softmax(shifted.double(), 1), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 37, 520, 4096])
def test_largest_and_smallest_in_16_bits(dtype: str, columns: int) -> None:
    x = loop_inputs.rows_with_extremes(columns, dtype).cuda()
    most, least = randn(8), torch.empty(8, dtype=x.dtype, device="cuda")
    tensors = {"x": x, "most": most, "least": least}
    run(loop_kernels.extremes(S0, columns, dtype), tensors, {"s0": 8}, CUDA, threads=0)
    torch.testing.assert_close(most, x.float().amax(1), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(least, x.amin(1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("columns", [1, 127, 1000, 1024, 8192, 32768, 49152, 100_000])
def test_layer_norm(dtype: str, columns: int) -> None:
    x = (randn(19, columns) + 3).to(getattr(torch, dtype))
    weight, bias = randn(columns).to(x.dtype), randn(columns).to(x.dtype)
    y, mean, rstd = torch.empty_like(x), randn(19), randn(19)
    tensors = {"x": x, "weight": weight, "bias": bias, "y": y, "mean_out": mean, "rstd_out": rstd}
    run(loop_kernels.layer_norm(S0, columns, dtype), tensors, {"s0": 19}, CUDA, threads=0)
    wide = x.double()
    close(mean, wide.mean(1))
    exact = torch.nn.functional.layer_norm(wide, (columns,), weight.double(), bias.double(), 1e-5)
    close(y, exact, max(1e-5, TOLERANCE[dtype]))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (0, 8), (1000, 3), (300, 1030), (4096, 512)])
@pytest.mark.parametrize("splits", [1, 5])
def test_column_sum(rows: int, columns: int, splits: int) -> None:
    z, g = randn(rows, columns), randn(rows, columns)
    dz, db = torch.empty_like(z), randn(columns)
    loop = loop_kernels.column_sum(S0, columns)
    schedule = replace(choose(loop, CUDA, {"s0": rows}), splits=splits)
    assert legal(loop, schedule, CUDA)
    tensors = {"z": z, "g": g, "dz": dz, "db": db}
    run(loop, tensors, {"s0": rows}, CUDA, schedule, threads=0)
    exact = torch.where(z > 0, g, 0)
    assert torch.equal(dz, exact)
    close(db, exact.double().sum(0), 2e-5)
    first = db.clone()
    run(loop, {**tensors, "dz": None}, {"s0": rows}, CUDA, schedule, threads=0)
    assert torch.equal(first, db)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("columns", [10, 37, 1024, 50257, 300_001])
@pytest.mark.parametrize("down", [False, True])
def test_logsumexp_in_one_sweep(dtype: str, columns: int, down: bool) -> None:
    rows = loop_inputs.hard_rows(columns, dtype)
    x = rows.T.contiguous().cuda() if down else rows.cuda()
    y = torch.empty(16, dtype=x.dtype, device="cuda")
    if down:
        loop, sizes = loop_kernels.column_logsumexp(S0, 16, dtype), {"s0": columns}
    else:
        loop, sizes = loop_kernels.row_logsumexp(S0, columns, dtype), {"s0": 16}
    dim = 0 if down else 1
    exact, eager = x.double().logsumexp(dim), x.logsumexp(dim).double()
    run(loop, {"x": x, "y": y}, sizes, CUDA, threads=0)
    finite = exact.isfinite()
    assert torch.equal(y[~finite].nan_to_num(), x.logsumexp(dim)[~finite].nan_to_num())
    assert torch.equal(y.isnan(), exact.isnan())
    # float64 is summed plainly, and only eager's result is there to compare with.
    digits = (columns if dtype == "float64" else 1) * torch.finfo(x.dtype).eps
    allowed = 2 * (eager - exact).abs() + 4 * digits * exact.abs() + digits
    assert bool(((y.double() - exact).abs() <= allowed)[finite].all())
    again = torch.empty_like(y)
    run(loop, {"x": x, "y": again}, sizes, CUDA, threads=0)
    assert torch.equal(y.nan_to_num(), again.nan_to_num()), "two runs, two results"


@pytest.mark.parametrize("n", [0, 1, 33, 1000, 10_000_001])
def test_full_sum(n: int) -> None:
    x, y = randn(n), randn(1)[0]
    run(loop_kernels.full_sum(S0), {"x": x, "y": y}, {"s0": n}, CUDA, threads=0)
    close(y, x.double().sum(), 1e-5 * max(1, n) ** 0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("area", [49, 196])
@pytest.mark.parametrize("splits", [1, 9])
def test_channel_sum(dtype: str, area: int, splits: int) -> None:
    x = randn(64, 24, area).to(getattr(torch, dtype))
    y, sums = torch.empty_like(x), randn(24)
    loop = loop_kernels.channel_sum(S0, 24, area, dtype)
    schedule = Schedule("row", 4, 128, unroll=4, splits=splits)
    if not legal(loop, schedule, CUDA):
        schedule = replace(schedule, lanes=1)
    run(loop, {"x": x, "y": y, "sums": sums}, {"s0": 64}, CUDA, schedule, threads=0)
    assert torch.equal(y, 2 * x)
    close(sums, (2 * x.double()).sum((0, 2)), 1e-4)


@pytest.mark.parametrize("example", [1000, 2**31])
def test_more_than_two_to_the_31_elements(example: int) -> None:
    """In vectors where the example had as many elements, else one by one."""
    n = 2**31 + 5
    x = torch.zeros(n, dtype=torch.uint8, device="cuda")
    x[-3:] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    body = loop_kernels.kernel(
        "bytes",
        [S0],
        [],
        {"x": "uint8"},
        {"y": "uint8"},
        [
            Load("x", "uint8", loop_kernels.access("x", 1)),
            Apply("y", "uint8", "add", ("x", "x")),
            Store("y", "uint8", loop_kernels.access("y", 1)),
        ],
    )
    y = torch.empty_like(x)
    schedule = choose(body, CUDA, {"s0": example})
    assert schedule.wide_index == (example > 1000)
    run(body, {"x": x, "y": y}, {"s0": n}, CUDA, schedule, threads=0)
    assert y[-4:].tolist() == [0, 2, 4, 6]
    assert int(y[: 2**20].sum()) == 0


@pytest.mark.parametrize("example", [8, 2**19])
def test_rows_of_more_than_two_to_the_31_elements(example: int) -> None:
    rows, columns = 2**19 + 8, 4096
    loop = loop_kernels.softmax(S0, columns, "bfloat16")
    schedule = choose(loop, CUDA, {"s0": example})
    assert schedule.wide_index == (example > 8)
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-9:].normal_()
    y = torch.empty_like(x)
    run(loop, {"x": x, "y": y}, {"s0": rows}, CUDA, schedule, threads=0)
    close(y[-9:], x[-9:].double().softmax(1), 8e-3)
    assert bool((y[:-9] == 1 / columns).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int64"])
@pytest.mark.parametrize("columns", [1, 37, 64, 1024, 8192, 50257, 3_000_001])
@pytest.mark.parametrize("backward", [False, True])
def test_scans_along_rows(dtype: str, columns: int, backward: bool) -> None:
    x = (randn(5, columns) * 9).to(getattr(torch, dtype))
    b, y = (randn(columns) * 9).to(x.dtype), torch.empty_like(x)
    loop = loop_kernels.row_scan(S0, columns, dtype, backward=backward)
    turned = (lambda t: t.flip(1)) if backward else (lambda t: t)
    exact = turned(turned(x.double() + x.double()).cumsum(1)) + b.double()
    eager = turned(turned(x + x).cumsum(1)) + b
    for given in (x, unaligned(x)):
        run(loop, {"x": given, "b": b, "y": y}, {"s0": 5}, CUDA, threads=0)
        worst = (eager.double() - exact).abs().max()
        digits = 0.0 if dtype == "int64" else 4 * torch.finfo(x.dtype).eps
        assert (y.double() - exact).abs().max() <= 2 * worst + digits * exact.abs().max()
        again = torch.empty_like(y)
        run(loop, {"x": given, "b": b, "y": again}, {"s0": 5}, CUDA, threads=0)
        assert torch.equal(y, again), "two runs, two results"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int64"])
@pytest.mark.parametrize("shape", [(3, 1, 9), (2, 700, 33), (16, 2048, 64), (1, 65536, 24)])
@pytest.mark.parametrize("backward", [False, True])
def test_scans_down_columns(dtype: str, shape: tuple[int, int, int], backward: bool) -> None:
    x = (randn(*shape) * 9).to(getattr(torch, dtype))
    s, y = torch.empty_like(x), torch.empty_like(x)
    loop = loop_kernels.column_scan(S0, *shape[1:], dtype, backward)
    turned = (lambda t: t.flip(1)) if backward else (lambda t: t)
    exact, eager = (turned(turned(each).cumsum(1)) for each in (x.double(), x))
    run(loop, {"x": x, "s": s, "y": y}, {"s0": shape[0]}, CUDA, threads=0)
    worst = (eager.double() - exact).abs().max()
    digits = 0.0 if dtype == "int64" else 4 * torch.finfo(x.dtype).eps
    assert (s.double() - exact).abs().max() <= 2 * worst + digits * exact.abs().max()
    again = torch.empty_like(s)
    run(loop, {"x": x, "s": again, "y": y}, {"s0": shape[0]}, CUDA, threads=0)
    assert torch.equal(s, again), "two runs, two results"
