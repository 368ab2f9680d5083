"""Functions that take a run of lanes at once, and operands transposed in tiles, against PyTorch."""

from __future__ import annotations

import itertools
import math
import platform
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.loop_kernels import access, kernel, row_major
from fusewright.ir.loop import Apply, Constant, Instruction, Load, LoopKernel, Reduce, Store
from fusewright.ir.operators import SCALAR_OPS
from fusewright.kinds.registry import render
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support import loop_runs
from tests.support.loop_runs import call, compile_source, run, together
from tests.support.precompiled import SANITIZED

# Flags that replace functions of vectors by those of lanes: only x86 has the former.
PORTABLE = ("-mno-avx512f",) if platform.machine() in ("x86_64", "AMD64") else ()
SIZES = [1, 7, 16, 127, 129, 1000, 5003]


def flat(name: str, n: int, dtype: str, body: list[Instruction], outputs: int = 1) -> LoopKernel:
    """A kernel over n elements of x whose last `outputs` values are y0, y1, …"""
    made = [item.name for item in body if isinstance(item, Apply)][-outputs:]
    stores = [Store(value, dtype, access(f"y{at}", 1)) for at, value in enumerate(made)]
    results = {f"y{at}": dtype for at in range(outputs)}
    load = Load("x", dtype, access("x", 1))
    return kernel(name, [n], [], {"x": dtype}, results, [load, *body, *stores])


def gelu(n: int, dtype: str) -> LoopKernel:
    body = [
        Constant("root", dtype, 0.5**0.5),
        Constant("one", dtype, 1.0),
        Constant("half", dtype, 0.5),
        Apply("scaled", dtype, "mul", ("x", "root")),
        Apply("error", dtype, "erf", ("scaled",)),
        Apply("more", dtype, "add", ("error", "one")),
        Apply("part", dtype, "mul", ("x", "half")),
        Apply("y", dtype, "mul", ("more", "part")),
    ]
    return flat("gelu", n, dtype, body)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", SIZES)
def test_one_function_between_two_loops(n: int, dtype: str) -> None:
    x = torch.randn(n, dtype=getattr(torch, dtype)) * 2
    y = torch.empty_like(x)
    run(gelu(n, dtype), {"x": x, "y0": y})
    exact = torch.nn.functional.gelu(x.double())
    tolerance = 3e-7 if dtype == "float32" else 5e-16
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


def chain(n: int) -> LoopKernel:
    """A value held across stages, a function of a function, and a check of large arguments
    between."""
    body = [
        Constant("three", "float64", 3.0),
        Apply("square", "float64", "mul", ("x", "x")),
        Apply("power", "float64", "exp", ("x",)),
        Apply("sum", "float64", "add", ("power", "square")),
        Apply("low", "float64", "log", ("sum",)),
        Apply("part", "float64", "fmod", ("low", "three")),
        Apply("wave", "float64", "cos", ("low",)),
        Apply("first", "float64", "mul", ("part", "wave")),
        Apply("second", "float64", "sub", ("square", "wave")),
    ]
    return flat("chain", n, "float64", body, outputs=2)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_values_are_held_across_stages(n: int, in_place: bool) -> None:
    x = torch.randn(n, dtype=torch.float64) * 3
    low = torch.log(x.exp() + x * x)
    exact = torch.fmod(low, 3) * low.cos(), x * x - low.cos()
    second = torch.empty_like(x)
    first = x if in_place else torch.empty_like(x)
    run(chain(n), {"x": x, "y0": first, "y1": second})
    torch.testing.assert_close(first, exact[0], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(second, exact[1], rtol=1e-13, atol=1e-14)


def test_straight_from_memory_to_memory() -> None:
    body = [Apply("y", "float64", "erfc", ("x",))]
    loop = flat("straight", 1000, "float64", body)
    assert "fw::erfc_run(elem.x0.from, out_0.to, n);" in text(loop)
    assert "kRun = 1024;" in text(loop) and "kRun = 256;" in text(gelu(1000, "float64"))
    x = torch.randn(1000, dtype=torch.float64)
    exact = torch.erfc(x)
    run(loop, {"x": x, "y0": None})
    run(loop, {"x": x, "y0": x})
    torch.testing.assert_close(x, exact, rtol=2e-15, atol=0)


def text(loop: LoopKernel) -> str:
    return render([(loop, choose(loop, Target.host(), {}))], Target.host()).text


@pytest.mark.parametrize("columns", [1, 63, 64, 200])
def test_sums_of_a_function_and_of_loaded_values(columns: int) -> None:
    body = [
        Load("x", "float32", row_major("x", 5, columns)),
        Apply("e", "float32", "erfc", ("x",)),
        Reduce("plain", "float32", "sum", "x"),
        Reduce("total", "float32", "sum", "e"),
        Store("plain", "float32", access("y0", 1, 0)),
        Store("total", "float32", access("y1", 1, 0)),
    ]
    results = {"y0": "float32", "y1": "float32"}
    loop = kernel("sums", [5], [columns], {"x": "float32"}, results, body)
    assert columns == 1 or "fw::nth<0>(acc).add_pairs(elem.x0.from, n)" in text(loop)
    assert columns == 1 or "fw::nth<1>(acc).add_pairs(x1_run, n)" in text(loop)
    x, plain, total = torch.randn(5, columns), torch.empty(5), torch.empty(5)
    run(loop, {"x": x, "y0": plain, "y1": total})
    torch.testing.assert_close(plain, x.double().sum(1).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, torch.erfc(x.double()).sum(1).float(), rtol=1e-6, atol=1e-6)


def column_sums(rows: int, columns: int) -> LoopKernel:
    body = [
        Load("x", "float32", access("x", 1, columns)),
        Reduce("total", "float32", "sum", "x"),
        Store("total", "float32", access("y", 1, 0)),
    ]
    return kernel("columns", [columns], [rows], {"x": "float32"}, {"y": "float32"}, body)


ROWS, COLUMNS = [1, 2, 3, 130], [1, 7, 8, 100, 1024, 1029]
COLUMN_SUMS = tuple(column_sums(*sizes) for sizes in itertools.product(ROWS, COLUMNS))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_columns_are_summed_two_rows_at_once(rows: int, columns: int) -> None:
    loop = column_sums(rows, columns)
    assert 1 in (rows, columns) or "add_two(elem.x0.from, next.x0.from, n)" in text(loop)
    x, y = torch.randn(rows, columns), torch.empty(columns)
    call(*together(COLUMN_SUMS)[loop], {"x": x, "y": y}, {}, 2)
    torch.testing.assert_close(y, x.double().sum(0).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_parts_of_columns_are_joined_side_by_side(kind: str, columns: int) -> None:
    rows = 2**18 // columns
    body = [
        Load("x", "float32", access("x", 1, columns)),
        Reduce("total", "float32", kind, "x"),
        Store("total", "float32", access("y", 1, 0)),
    ]
    loop = kernel("parts", [columns], [rows], {"x": "float32"}, {"y": "float32"}, body)
    assert choose(loop, Target.host(), {}).splits > 1
    x, y = torch.randn(rows, columns), torch.empty(columns)
    run(loop, {"x": x, "y": y})
    exact = x.double().sum(0) if kind == "sum" else x.double().amax(0)
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-5 if kind == "sum" else 0)


def test_a_few_rows_are_added_exactly() -> None:
    """They may be partial sums that cancel."""
    body = [
        Load("x", "float32", access("x", 1, 40)),
        Reduce("total", "float32", "sum", "x"),
        Store("total", "float32", access("y", 1, 0)),
    ]
    loop = kernel("few", [40], [6], {"x": "float32"}, {"y": "float32"}, body)
    x, y = torch.randn(6, 40), torch.empty(40)
    x[5] = -x[:5].sum(0) + 1e-6 * torch.randn(40)
    run(loop, {"x": x, "y": y})
    assert torch.equal(y, x.double().sum(0).float())


@pytest.mark.parametrize("columns", [64, 100, 1024, 5000])
@pytest.mark.parametrize("shift", [0.0, 1.0, 1e4])
def test_sums_err_by_less_than_eager(columns: int, shift: float) -> None:
    body = [
        Load("x", "float32", row_major("x", 200, columns)),
        Reduce("total", "float32", "sum", "x"),
        Store("total", "float32", access("y", 1, 0)),
    ]
    loop = kernel("rows", [200], [columns], {"x": "float32"}, {"y": "float32"}, body)
    x, y = torch.randn(200, columns) + shift, torch.empty(200)
    run(loop, {"x": x, "y": y})
    exact = x.double().sum(1)
    ours, eagers = (y - exact).abs(), (x.sum(1) - exact).abs()
    assert ours.mean() <= eagers.mean() and ours.max() <= eagers.max()


def test_bfloat16_beside_a_function() -> None:
    """Conversions of whole vectors and of the remaining lanes round as PyTorch's do."""
    body = [
        Load("x", "float32", access("x", 1)),
        Load("z", "bfloat16", access("z", 1)),
        Apply("e", "float32", "exp", ("x",)),
        Apply("short", "bfloat16", "cast", ("x",)),
        Apply("long", "float32", "cast", ("z",)),
        Store("e", "float32", access("e", 1)),
        Store("short", "bfloat16", access("s", 1)),
        Store("long", "float32", access("l", 1)),
    ]
    inputs = {"x": "float32", "z": "bfloat16"}
    results = {"e": "float32", "s": "bfloat16", "l": "float32"}
    z = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    ties = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32) & -(2**15)
    n = 2**16 - 5
    x, z = ties.view(torch.float32)[:n].clone(), z[:n].clone()
    e, short, long = torch.empty_like(x), torch.empty_like(z), torch.empty_like(x)
    loop = kernel("conversions", [n], [], inputs, results, body)
    assert "narrow(" in text(loop) and "widen(" in text(loop)
    run(loop, {"x": x, "z": z, "e": e, "s": short, "l": long})
    for ours, theirs in ((short, x.bfloat16()), (long, z.float())):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours[~theirs.isnan()], theirs[~theirs.isnan()])


RUNS = [(op, dtype) for op, each in SCALAR_OPS.items() for dtype in each.run]


def once_a_row(op: str, dtype: str) -> LoopKernel:
    body = [
        Load("r", dtype, access("r", 1, 0)),
        Load("x", dtype, row_major("x", 40, 3)),
        Reduce("total", dtype, "sum", "x"),
        Apply("once", dtype, op, ("r",)),
        Apply("all", dtype, "add", ("once", "total")),
        Store("all", dtype, access("y", 1, 0)),
    ]
    return kernel("rows", [40], [3], {"r": dtype, "x": dtype}, {"y": dtype}, body)


def each_element(n: int, op: str, dtype: str) -> LoopKernel:
    return flat("each", n, dtype, [Apply("y", dtype, op, ("x",))])


ONCE_AND_EACH = tuple(loop for run in RUNS for loop in (once_a_row(*run), each_element(40, *run)))
ALONE = tuple(each_element(1000, *run) for run in RUNS)


@pytest.mark.parametrize(("op", "dtype"), RUNS)
def test_a_value_of_a_row_has_the_bits_of_an_elements_value(op: str, dtype: str) -> None:
    """Backward may compute for every element what forward computed once for a row."""
    built = together(ONCE_AND_EACH)
    kind = getattr(torch, dtype)
    r = torch.rand(40, dtype=kind) * 0.9 + 0.05
    y, each = torch.empty_like(r), torch.empty_like(r)
    zeros = torch.zeros(40, 3, dtype=kind)
    call(*built[once_a_row(op, dtype)], {"r": r, "x": zeros, "y": y}, {}, 2)
    call(*built[each_element(40, op, dtype)], {"x": r, "y0": each}, {}, 2)
    assert torch.equal(y, each)


@pytest.mark.parametrize(("op", "dtype"), RUNS)
def test_portable_code_without_vector_extensions(op: str, dtype: str) -> None:
    built = together(ALONE, PORTABLE)[each_element(1000, op, dtype)]
    x = torch.rand(1000, dtype=getattr(torch, dtype)) * 0.9 + 0.05
    y = torch.empty_like(x)
    call(*built, {"x": x, "y0": y}, {}, 1)
    exact = getattr(torch, op)(x.double())
    tolerance = 3e-7 if dtype == "float32" else 2e-15
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["sin", "cos", "tan"])
@pytest.mark.parametrize("flags", [(), PORTABLE])
def test_sine_and_cosine_of_large_arguments_in_place(
    op: str, dtype: str, flags: tuple[str, ...]
) -> None:
    """Large arguments among small ones, infinity and NaN: each lane has the result it has alone."""
    loop = flat("turns", 77, dtype, [Apply("y", dtype, op, ("x",))])
    source = render([(loop, choose(loop, Target.host(), {}))], Target.host())
    built = compile_source(source, flags)
    near = torch.randn(77, dtype=getattr(torch, dtype)) * 3
    near[5::16] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], dtype=near.dtype)
    mixed = near.clone()
    far = torch.arange(77) % 7 == 3
    mixed[far] = (1.0e5 * (2 + torch.rand(int(far.sum())))).to(near.dtype)
    exact = getattr(torch, op)(mixed.double())
    alone = near.clone()
    call(built, source, {"x": alone, "y0": alone}, {}, 1)
    call(built, source, {"x": mixed, "y0": mixed}, {}, 1)
    assert torch.equal(mixed[~far].nan_to_num(7), alone[~far].nan_to_num(7))
    tolerance = 2e-7 if dtype == "float32" else 1e-15
    torch.testing.assert_close(mixed.double(), exact, rtol=tolerance, atol=0, equal_nan=True)
    if op != "cos":
        assert alone[5:22:16].signbit().tolist() == [False, True]


# Functions of lanes use shorter polynomials and err by more; the quotient of two sums rounds twice.
PROCESSOR = Path("/proc/cpuinfo")
VECTORS = PROCESSOR.exists() and "avx512dq" in PROCESSOR.read_text()
UNITS = 1.2 if VECTORS else 4.0
MORE_UNITS = {"tan": 2.7, "erfc": 1.3}
DOMAINS = {"log": (0.0, 2.5), "erfinv": (-1.0, 1.0), "erfc": (-6.0, 26.0)}
# Where one polynomial of erfc ends and the next begins (kErfcScale and kErfcShift).
BORDERS = [78.87109375 / (at + 0.5) - 4.265625 for at in range(2, 18)]


@pytest.mark.parametrize("op", [op for op, dtype in RUNS if dtype == "float64"])
def test_errors_of_doubles(op: str) -> None:
    mpmath = pytest.importorskip("mpmath")
    least, most = DOMAINS.get(op, (-6.0, 6.0))
    draws = torch.rand(300, dtype=torch.float64) * (most - least) + least
    beside = [math.nextafter(x, end) for x in BORDERS for end in (0.0, 30.0)]
    more = torch.tensor(beside, dtype=torch.float64) if op == "erfc" else draws * 2.0**-20
    x = torch.cat([draws, more[more.abs() < 26.5]])
    y = torch.empty_like(x)
    run(flat("one", x.numel(), "float64", [Apply("y", "float64", op, ("x",))]), {"x": x, "y0": y})
    with mpmath.workprec(200):
        for given, ours in zip(x.tolist(), y.tolist(), strict=True):
            exact = getattr(mpmath, op)(mpmath.mpf(given))
            unit = math.ulp(float(exact))
            most = max(UNITS, MORE_UNITS.get(op, 0.0)) * unit
            assert abs(exact - ours) <= most, (given, ours, float(abs(exact - ours) / unit))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_erf_reaches_one(dtype: str) -> None:
    """In gelu, x multiplies the difference from 1."""
    kind = getattr(torch, dtype)
    x = torch.tensor([4.0, 6.0, 100.0, 1e30, math.inf], dtype=kind)
    x = torch.cat([x, -x])
    y = torch.empty_like(x)
    run(flat("ends", 10, dtype, [Apply("y", dtype, "erf", ("x",))]), {"x": x, "y0": y})
    ended = x.abs() > (3.95 if dtype == "float32" else 5.95)
    assert torch.equal(y[ended], x.sign()[ended])


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer takes more stack")
def test_long_chains_of_functions_need_little_stack() -> None:
    """Values between functions are held as short runs: 60 of float64 in a thread of 256 KB."""
    name, body = "x", list[Instruction]()
    for at in range(60):
        body += [Apply(f"e{at}", "float64", "exp", (name,))]
        body += [Apply(f"n{at}", "float64", "neg", (f"e{at}",))]
        name = f"n{at}"
    x = torch.randn(1000, dtype=torch.float64)
    y = torch.empty_like(x)
    library, source = loop_runs.build(flat("chain", 1000, "float64", body), Target.host())
    before = threading.stack_size(256 * 1024)
    thread = threading.Thread(target=call, args=(library, source, {"x": x, "y0": y}, {}, 1))
    thread.start()
    thread.join()
    threading.stack_size(before)
    exact = x
    for _ in range(60):
        exact = -exact.exp()
    torch.testing.assert_close(y, exact)


def turned(rows: int, columns: int, dtype: str) -> LoopKernel:
    body = [
        Load("x", dtype, row_major("x", 3, rows, columns)),
        Load("z", dtype, access("z", rows * columns, 1, rows)),
        Apply("y", dtype, "add", ("x", "z")),
        Store("y", dtype, row_major("y", 3, rows, columns)),
    ]
    return kernel("turn", [3, rows, columns], [], {"x": dtype, "z": dtype}, {"y": dtype}, body)


SHAPES = [(1, 1), (16, 16), (15, 33), (64, 64), (65, 130), (200, 31)]
TYPES = ["float32", "float64", "float16", "int64", "uint8"]
TURNED = tuple(turned(*shape, dtype) for shape in SHAPES for dtype in TYPES)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_transposed_operand(rows: int, columns: int, dtype: str) -> None:
    """y[b, i, j] = x[b, i, j] + z[b, j, i]."""
    kind = getattr(torch, dtype)
    x = (torch.randn(3, rows, columns) * 40).abs().to(kind)
    z = (torch.randn(3, columns, rows) * 40).abs().to(kind)
    y = torch.empty_like(x)
    for flags in ((), PORTABLE):
        y.zero_()
        built = together(TURNED, flags)[turned(rows, columns, dtype)]
        call(*built, {"x": x, "z": z, "y": y}, {}, 2)
        assert torch.equal(y, x + z.transpose(1, 2))


def test_a_transposed_operand_is_tiled_in_the_text() -> None:
    body = [
        Load("z", "float32", access("z", 1, 100)),
        Apply("y", "float32", "exp", ("z",)),
        Store("y", "float32", row_major("y", 100, 100)),
    ]
    loop = kernel("turned", [100, 100], [], {"z": "float32"}, {"y": "float32"}, body)
    assert (
        "fw::transpose_tile(elem, &Elem<V>::x0, rows, n, memory + 0 * fw::kTransposedBytes);"
        in text(loop)
    )
    z, y = torch.randn(100, 100), torch.empty(100, 100)
    loop_runs.run(loop, {"z": z, "y": y})
    torch.testing.assert_close(y, z.t().double().exp().float(), rtol=2e-7, atol=0)


def test_exponentials_in_rows_and_alone() -> None:
    """Powers from denormal numbers to infinity, and NaN: a run gives the bits of single calls."""
    body = [
        Load("x", "float32", row_major("x", 6, 100)),
        Apply("e", "float32", "exp", ("x",)),
        Reduce("total", "float32", "sum", "e"),
        Store("e", "float32", row_major("e", 6, 100)),
        Store("total", "float32", access("t", 1, 0)),
    ]
    results = {"e": "float32", "t": "float32"}
    loop = kernel("powers", [6], [100], {"x": "float32"}, results, body)
    x = torch.linspace(-87.2, 88.4, 600).reshape(6, 100)
    for row, value in enumerate([-100.0, 89.0, float("nan"), float("inf"), -float("inf")]):
        x[row, 7 * row] = value
    powers, each = torch.empty_like(x), torch.empty(600)
    run(loop, {"x": x, "e": powers, "t": torch.empty(6)})
    single = flat("single", 600, "float32", [Apply("y", "float32", "exp", ("x",))])
    run(single, {"x": x.flatten(), "y0": each})
    assert torch.equal(powers.flatten().nan_to_num(7), each.nan_to_num(7))
    exact = torch.exp(x.double()).float()
    torch.testing.assert_close(powers, exact, rtol=2e-7, atol=2e-45, equal_nan=True)
