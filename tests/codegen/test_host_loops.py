"""Rendered kernels, built by g++ and run, against float64 computed by PyTorch."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from benchmarks import loop_kernels
from benchmarks.loop_kernels import access, kernel, row_major
from fusewright.errors import CodegenError
from fusewright.ir.graph import Dim, Ratio
from fusewright.ir.loop import Apply, Constant, Index, Load, LoopKernel, Reduce, Store
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support import loop_runs, nvcc
from tests.support.loop_runs import call, run, run_among, together
from tests.support.tensors import close

S0 = Dim(1, ("s0",))
HOST, CUDA = Target.host(), Target.cuda()
FLOATS = ["float16", "bfloat16", "float32", "float64"]
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-12}


@pytest.mark.parametrize("n", [0, 1, 3, 127, 1000, 100_003])
def test_pointwise_over_a_symbol(n: int) -> None:
    a, b, y = torch.randn(n), torch.randn(n), torch.full((n,), 7.0)
    run(loop_kernels.add_relu(S0), {"a": a, "b": b, "y": y}, {"s0": n})
    assert torch.equal(y, torch.relu(a + b))


SHAPES = ((1, 1), (3, 127), (64, 1000), (0, 5), (5, 0))
BIASED = tuple(loop_kernels.bias_relu(*shape, dtype) for shape in SHAPES for dtype in FLOATS)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pointwise_broadcast(dtype: str, shape: tuple[int, int]) -> None:
    kind = getattr(torch, dtype)
    x, b = torch.randn(shape).to(kind), torch.randn(shape[1]).to(kind)
    y = torch.empty_like(x)
    run_among(BIASED, loop_kernels.bias_relu(*shape, dtype), {"x": x, "b": b, "y": y}, {})
    close(y, torch.relu(x.double() + b.double()), TOLERANCE[dtype])


def test_pointwise_transposed_strided_and_offset() -> None:
    """y[i, j] = x[j, i] - z[i, 3 + 2j], y being column-major."""
    rows, columns = 37, 50
    x, z = torch.randn(columns, rows), torch.randn(rows, 2 * columns + 3)
    y = torch.empty(columns, rows)
    body = [
        Load("x", "float32", access("x", 1, rows)),
        Load("z", "float32", access("z", 2 * columns + 3, 2, offset=(3,))),
        Apply("y", "float32", "sub", ("x", "z")),
        Store("y", "float32", access("y", 1, rows)),
    ]
    inputs = {"x": "float32", "z": "float32"}
    loop = kernel("mixed", [rows, columns], [], inputs, {"y": "float32"}, body)
    run(loop, {"x": x, "z": z, "y": y})
    assert torch.equal(y, x - z[:, 3::2].t())


def test_pointwise_symbol_in_the_middle_and_strided_store() -> None:
    """y[a, s, c] = x[a, s, c] + w[s], written through a stride of two."""
    batch = 5
    body = [
        Load("x", "float32", row_major("x", 3, S0, 4)),
        Load("w", "float32", access("w", 0, 1, 0)),
        Apply("y", "float32", "add", ("x", "w")),
        Store("y", "float32", access("y", S0 * 8, 8, 2)),
    ]
    inputs = {"x": "float32", "w": "float32"}
    loop = kernel("middle", [3, S0, 4], [], inputs, {"y": "float32"}, body)
    x, w, y = torch.randn(3, batch, 4), torch.randn(batch), torch.zeros(3, batch, 8)
    run(loop, {"x": x, "w": w, "y": y}, {"s0": batch})
    assert torch.equal(y[..., ::2], x + w[:, None])
    assert (y[..., 1::2] == 0).all()


def test_pointwise_mixed_dtypes_and_constants() -> None:
    """y = where(mask, float(i) * 0.5, s0) with i = 2·index + 1, over int64, bool and bfloat16."""
    n = 130
    body = [
        Load("mask", "bool", access("mask", 1)),
        Index("i", "int64", (Dim(2),), (Dim(1),)),
        Apply("f", "float32", "cast", ("i",)),
        Constant("half", "float32", 0.5),
        Apply("h", "float32", "mul", ("f", "half")),
        Constant("size", "float32", Ratio("3.0*s0/2.0")),
        Apply("picked", "float32", "where", ("mask", "h", "size")),
        Store("picked", "bfloat16", access("y", 1)),
        Store("i", "int64", access("index", 1)),
    ]
    outputs = {"y": "bfloat16", "index": "int64"}
    loop = kernel("mixed_types", [S0], [], {"mask": "bool"}, outputs, body)
    mask = torch.rand(n) > 0.5
    y, index = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int64)
    run(loop, {"mask": mask, "y": y, "index": index}, {"s0": n})
    i = 2 * torch.arange(n) + 1
    assert torch.equal(index, i)
    assert torch.equal(y, torch.where(mask, i * 0.5, torch.tensor(1.5 * n)).bfloat16())


def test_scalar_kernel_without_axes() -> None:
    body = [
        Load("x", "float32", access("x")),
        Apply("y", "float32", "exp", ("x",)),
        Store("y", "float32", access("y")),
    ]
    loop = kernel("scalar", [], [], {"x": "float32"}, {"y": "float32"}, body)
    x, y = torch.tensor(1.5), torch.empty(())
    run(loop, {"x": x, "y": y})
    close(y, torch.exp(x.double()))


def test_null_output_is_not_written() -> None:
    z, g = torch.randn(40, 17), torch.randn(40, 17)
    db = torch.empty(17)
    run(loop_kernels.column_sum(40, 17), {"z": z, "g": g, "dz": None, "db": db})
    close(db, torch.where(z > 0, g, 0).double().sum(0))
    dz = torch.empty(40, 17)
    run(loop_kernels.column_sum(40, 17), {"z": z, "g": g, "dz": dz, "db": None})
    assert torch.equal(dz, torch.where(z > 0, g, 0))


def test_in_place() -> None:
    x = torch.randn(9, 77)
    expected = torch.softmax(x.double(), 1)
    run(loop_kernels.softmax(9, 77), {"x": x, "y": x})
    close(x, expected)


COLUMNS = [1, 3, 32, 127, 1000]
SOFTMAXES = tuple(
    loop_kernels.softmax(S0, columns, dtype) for columns in COLUMNS for dtype in FLOATS
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_softmax(dtype: str, columns: int) -> None:
    x = (torch.randn(13, columns) * 20).to(getattr(torch, dtype))
    y = torch.empty_like(x)
    built = together(SOFTMAXES, s0=13)[loop_kernels.softmax(S0, columns, dtype)]
    call(*built, {"x": x, "y": y}, {"s0": 13}, 2)
    close(y, torch.softmax(x.double(), 1), TOLERANCE[dtype])


@pytest.mark.parametrize("columns", [1, 5, 64, 131, 1000])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_layer_norm(columns: int, shift: float) -> None:
    x = torch.randn(7, columns) + shift
    weight, bias = torch.randn(columns), torch.randn(columns)
    y, mean, rstd = torch.empty_like(x), torch.empty(7), torch.empty(7)
    tensors = {"x": x, "weight": weight, "bias": bias, "y": y, "mean_out": mean, "rstd_out": rstd}
    run(loop_kernels.layer_norm(S0, columns), tensors, {"s0": 7})
    wide = x.double()
    var, center = torch.var_mean(wide, 1, correction=0)
    close(mean, center)
    close(rstd, (var + 1e-5).rsqrt(), 1e-5)
    exact = torch.nn.functional.layer_norm(wide, (columns,), weight.double(), bias.double(), 1e-5)
    # x - mean is float32: with a mean of 10^4, its rounding shows.
    close(y, exact, 1e-5 if shift == 0 or columns == 1 else 2e-2)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 127), (1000, 3), (300, 1030), (0, 8)])
@pytest.mark.parametrize("splits", [1, 5])
def test_column_sum_with_side_store(rows: int, columns: int, splits: int) -> None:
    z, g = torch.randn(rows, columns), torch.randn(rows, columns)
    dz, db = torch.empty_like(z), torch.full((columns,), 9.0)
    loop = loop_kernels.column_sum(S0, columns)
    schedule = replace(Schedule("column", lanes=256), splits=splits)
    run(loop, {"z": z, "g": g, "dz": dz, "db": db}, {"s0": rows}, schedule=schedule)
    exact = torch.where(z > 0, g, 0)
    assert torch.equal(dz, exact)
    close(db, exact.double().sum(0), 1e-5)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000, 300_001])
@pytest.mark.parametrize("splits", [1, 7])
def test_full_sum(n: int, splits: int) -> None:
    x, y = torch.randn(n), torch.empty(())
    schedule = Schedule("row", lanes=32, splits=splits)
    run(loop_kernels.full_sum(S0), {"x": x, "y": y}, {"s0": n}, schedule=schedule)
    # Terms may cancel. The sum then says nothing about the rounding errors.
    error = abs(float(y) - float(x.double().sum()))
    assert error <= 1e-6 * abs(float(y)) or error <= 5e-8 * float(x.norm())


def test_channel_sum_over_two_inner_axes() -> None:
    x = torch.randn(6, 5, 49)
    y, sums = torch.empty_like(x), torch.empty(5)
    for splits in (1, 3):
        schedule = Schedule("row", lanes=32, splits=splits)
        tensors = {"x": x, "y": y, "sums": sums}
        run(loop_kernels.channel_sum(S0, 5, 49), tensors, {"s0": 6}, schedule=schedule)
        assert torch.equal(y, 2 * x)
        close(sums, (2 * x.double()).sum((0, 2)))


def test_results_do_not_depend_on_threads() -> None:
    x, g = torch.randn(257, 3001), torch.randn(257, 3001)
    for loop, tensors in (
        (loop_kernels.full_sum(x.numel()), {"x": x, "y": torch.empty(())}),
        (
            loop_kernels.column_sum(257, 3001),
            {"z": x, "g": g, "dz": torch.empty_like(x), "db": torch.empty(3001)},
        ),
    ):
        out = list(tensors)[-1]
        runs = []
        for threads in (1, 2, 3, 7):
            run(loop, tensors, threads=threads)
            runs.append(tensors[out].clone())
        assert all(torch.equal(runs[0], each) for each in runs[1:])


REDUCED = {
    "sum": (lambda x: x.sum(1), 0.0),
    "prod": (lambda x: x.prod(1), 1.0),
    "max": (lambda x: x.amax(1), -math.inf),
    "min": (lambda x: x.amin(1), math.inf),
}


def reduction(kind: str, dtype: str, rows: int, columns: int, result: str = "") -> LoopKernel:
    result = result or dtype
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Reduce("y", result, kind, "x"),
        Store("y", result, access("y", 1, 0)),
    ]
    return kernel(f"reduce_{kind}_{dtype}", [rows], [columns], {"x": dtype}, {"y": result}, body)


TYPES = ["float32", "int64", "int32"]
REDUCTIONS = tuple(
    reduction(kind, dtype, 5, columns) for kind in REDUCED for dtype in TYPES for columns in (67, 0)
)


@pytest.mark.parametrize("kind", REDUCED)
@pytest.mark.parametrize("dtype", TYPES)
def test_reductions(kind: str, dtype: str) -> None:
    exact, identity = REDUCED[kind]
    whole = getattr(torch, dtype)
    x = (torch.randn(5, 67) * 3).to(whole)
    y = torch.empty(5, dtype=whole)
    built = together(REDUCTIONS)
    call(*built[reduction(kind, dtype, 5, 67)], {"x": x, "y": y}, {}, 2)
    # Integers wrap in the dtype that was asked for, as x.prod(dtype=...) does.
    expected = exact(x.double()) if dtype == "float32" else exact(x).to(whole)
    close(y, expected, 1e-5)
    call(*built[reduction(kind, dtype, 5, 0)], {"x": x, "y": y}, {}, 2)
    empty = torch.tensor(identity)
    if dtype != "float32" and math.isinf(identity):
        info = torch.iinfo(whole)
        empty = torch.tensor(info.min if identity < 0 else info.max)
    assert (y == empty.to(whole)).all()


def test_maximum_keeps_nan() -> None:
    x, y = torch.randn(3, 100), torch.empty(3)
    x[1, 70] = math.nan
    for kind in ("max", "min"):
        run(reduction(kind, "float32", 3, 100), {"x": x, "y": y})
        assert y.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_any_and_all(dtype: str) -> None:
    x = (torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]]) != 0).to(getattr(torch, dtype))
    y = torch.empty(3, dtype=torch.bool)
    run(reduction("any", dtype, 3, 3, "bool"), {"x": x, "y": y})
    assert y.tolist() == [False, True, True]
    run(reduction("all", dtype, 3, 3, "bool"), {"x": x, "y": y})
    assert y.tolist() == [False, False, True]
    run(reduction("all", dtype, 3, 0, "bool"), {"x": x, "y": y})
    assert y.all()


def test_welford_of_an_empty_axis() -> None:
    body = [
        Load("x", "float32", row_major("x", 4, 0)),
        Reduce("mean", "float32", "welford", "x", "m2"),
        Store("mean", "float32", access("mean", 1, 0)),
        Store("m2", "float32", access("m2", 1, 0)),
    ]
    outputs = {"mean": "float32", "m2": "float32"}
    loop = kernel("empty_welford", [4], [0], {"x": "float32"}, outputs, body)
    mean, m2 = torch.empty(4), torch.empty(4)
    run(loop, {"x": torch.empty(4, 0), "mean": mean, "m2": m2})
    assert mean.isnan().all()
    assert (m2 == 0).all()


def test_row_values_spread_and_reduced() -> None:
    """The row's sum is added to every element; and a value of the row is summed over the row."""
    rows, columns = 4, 37
    body = [
        Load("x", "float32", row_major("x", rows, columns)),
        Load("w", "float32", access("w", 1, 0)),
        Reduce("total", "float32", "sum", "x"),
        Reduce("many", "float32", "sum", "w"),
        Store("total", "float32", row_major("spread", rows, columns)),
        Store("many", "float32", access("many", 1, 0)),
    ]
    outputs = {"spread": "float32", "many": "float32"}
    inputs = {"x": "float32", "w": "float32"}
    loop = kernel("spread", [rows], [columns], inputs, outputs, body)
    x, w = torch.randn(rows, columns), torch.randn(rows)
    spread, many = torch.empty(rows, columns), torch.empty(rows)
    run(loop, {"x": x, "w": w, "spread": spread, "many": many})
    close(spread, x.double().sum(1, keepdim=True).expand(-1, columns), 1e-5)
    close(many, w.double() * columns, 1e-5)


def test_reduction_over_an_axis_of_one_and_indices() -> None:
    body = [
        Load("x", "float32", row_major("x", 6, 1)),
        Index("i", "int64", (Dim(10), Dim(1))),
        Reduce("y", "float32", "sum", "x"),
        Reduce("last", "int64", "max", "i"),
        Store("y", "float32", access("y", 1, 0)),
        Store("last", "int64", access("last", 1, 0)),
    ]
    outputs = {"y": "float32", "last": "int64"}
    loop = kernel("one", [6], [1], {"x": "float32"}, outputs, body)
    x, y, last = torch.randn(6, 1), torch.empty(6), torch.empty(6, dtype=torch.int64)
    run(loop, {"x": x, "y": y, "last": last})
    assert torch.equal(y, x[:, 0])
    assert last.tolist() == [0, 10, 20, 30, 40, 50]


def test_text_repeats_and_nothing_escapes_its_comment() -> None:
    loop = replace(loop_kernels.add_relu(S0), summary="evil */ \n#error no \\")
    source = render([(loop, choose(loop, HOST, {"s0": 8}))], HOST)
    again = render([(loop, choose(loop, HOST, {"s0": 8}))], HOST)
    assert source == again
    assert not any(line.lstrip().startswith("#error") for line in source.text.splitlines())
    assert not any(
        line.endswith("\\") and line.startswith("//") for line in source.text.splitlines()
    )
    assert '#include "' not in source.text


def test_odd_names_become_identifiers() -> None:
    body = [
        Load("int", "float32", access("x.y", 1)),
        Load("a b", "float32", access("x y", 1)),
        Apply("a-b", "float32", "add", ("int", "a b")),
        Store("a-b", "float32", access("class", 1)),
    ]
    inputs = {"x.y": "float32", "x y": "float32"}
    loop = kernel("odd", [5], [], inputs, {"class": "float32"}, body)
    a, b, y = torch.randn(5), torch.randn(5), torch.empty(5)
    run(loop, {"x.y": a, "x y": b, "class": y})
    assert torch.equal(y, a + b)


def test_wrong_kernels_raise_named_errors() -> None:
    good = loop_kernels.add_relu(8)
    bad_op = Apply("s", "float32", "frobnicate", ("a", "b"))
    bad_type = Apply("s", "float64", "add", ("a", "b"))
    for item in (bad_op, bad_type):
        broken = replace(good, body=(*good.body[:2], item, *good.body[3:]))
        with pytest.raises(CodegenError):
            render([(broken, Schedule("pointwise"))], HOST)
    with pytest.raises(CodegenError):
        render([(replace(good, name="a b"), Schedule("pointwise"))], HOST)
    with pytest.raises(CodegenError):
        render([(good, Schedule("row"))], HOST)
    with pytest.raises(CodegenError):
        render([(good, Schedule("pointwise"))] * 2, HOST)


CUDA_CASES = {
    "pointwise": (loop_kernels.add_relu(S0), {"s0": 1 << 20}),
    "row": (loop_kernels.layer_norm(S0, 1024), {"s0": 64}),
    "split": (loop_kernels.channel_sum(S0, 8, 64, "bfloat16"), {"s0": 512}),
    "column": (loop_kernels.column_sum(S0, 256), {"s0": 4096}),
}


@nvcc.needed
def test_cuda_compiles() -> None:
    """Every kind of schedule in one translation unit. tests/gpu checks what it computes."""
    kernels = [
        (replace(loop, name=f"{loop.name}_{kind}"), choose(loop, CUDA, sizes))
        for kind, (loop, sizes) in CUDA_CASES.items()
    ]
    source = render(kernels, CUDA)
    library = loop_runs.compile_source(
        source, (*nvcc.gencode(nvcc.BOTH), "-Werror", "all-warnings")
    )
    for entry in source.entries:
        assert getattr(library, entry.name) is not None


def test_a_cached_row_computes_exponentials_once() -> None:
    """The GPU holds them in registers. A row that is read again computes them again."""
    loop = loop_kernels.softmax(S0, 4096, "bfloat16")
    cached, again = (
        render([(loop, Schedule("row", 8, 128, unroll=4, cached=cached))], CUDA).text
        for cached in (True, False)
    )
    calls = "return fw::approximate_exp("
    assert cached.count(calls) == 1
    assert again.count("fw::approximate_exp(") == cached.count("fw::approximate_exp(") + 1
    assert re.search(r"float x\d+_kept\[V\];", cached)
    assert "_kept" not in again.split("struct softmax_body")[1]
    # One running sum takes the lanes of a vector together.
    assert "FW_REDUCES(1, fw::Sum<float, 1>)" in cached
    assert re.search(r"fw::nth<0>\(acc\)\.add_all\(x\d+_lanes\);", cached)
    # The reciprocal of a divisor that a whole row shares is computed once.
    assert re.search(r"row\.(x\d+)_divisor\[v\] = fw::CommonDivisor\(\1\);", cached)
    assert "fw::approximate_div(power, total_divisor)" in cached
    exact = render([(loop_kernels.softmax(S0, 4096), Schedule("row", 4, 256))], CUDA).text
    assert "fw::exp(" in exact and re.search(r"fw::div\(.*, total_divisor\)", exact)
    on_host = render([(loop, choose(loop, HOST, {"s0": 4}))], HOST).text
    assert "Divisor" not in on_host.split("struct softmax_body")[1]


@pytest.mark.parametrize(("by", "divided"), [(1.5, True), (2.0, False), (-0.25, False)])
def test_division_by_a_constant_multiplies_by_its_reciprocal(by: float, divided: bool) -> None:
    """Powers of two are left to the compiler, which multiplies."""
    body = [
        Load("x", "float32", access("x", 1)),
        Constant("c", "float32", by),
        Apply("y", "float32", "div", ("x", "c")),
        Store("y", "float32", access("y", 1)),
    ]
    loop = kernel("quotient", [S0], [], {"x": "float32"}, {"y": "float32"}, body)
    text = render([(loop, Schedule("pointwise", 4))], CUDA).text
    number = {1.5: "1.5f", 2.0: "2.0f", -0.25: "-0.25f"}[by]
    expected = f"fw::div(x, fw::CommonDivisor({number}))" if divided else f"x / {number}"
    assert f"return {expected};" in text
