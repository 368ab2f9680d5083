"""Running sums and products: along rows and down columns, from either end, and in models."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusewright
from benchmarks import loop_kernels
from fusewright.codegen.form import value_dtypes
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ProgramPlans
from fusewright.errors import CodegenError
from fusewright.ir.graph import Dim
from fusewright.ir.interpret import interpret
from fusewright.ir.loop import LoopKernel, Scan
from fusewright.plan.steps import Call, Plan
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from tests.support import cuda_on_host, loop_runs
from tests.support.emulated_modules import on_library, trained
from tests.support.models import Lambda
from tests.support.plans import steps_of
from tests.support.tensors import close, unaligned

S0 = Dim(1, ("s0",))
CUDA = Target.cuda()
DTYPES = ("float16", "bfloat16", "float32", "float64", "int64")
Run = Callable[[LoopKernel, dict[str, Tensor], dict[str, int]], object]


def turned(x: Tensor, backward: bool) -> Tensor:
    return x.flip(1) if backward else x


def along(x: Tensor, backward: bool, kind: str = "sum") -> Tensor:
    scan = {"sum": torch.cumsum, "prod": torch.cumprod}[kind]
    return turned(scan(turned(x, backward), 1), backward)


def as_exact(mine: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Special values as in eager; elsewhere at most twice its error and a few digits of the largest
    value: a GPU adds floats to floats."""
    assert mine.dtype == eager.dtype and mine.shape == eager.shape
    if not mine.dtype.is_floating_point:
        assert torch.equal(mine, eager)
        return
    finite = exact.isfinite() & eager.isfinite()
    assert torch.equal(mine.isnan(), eager.isnan())
    assert torch.equal(mine[~finite].nan_to_num(), eager[~finite].nan_to_num())
    if bool(finite.any()):
        worst = (eager.double() - exact)[finite].abs().max()
        digits = 8 * torch.finfo(mine.dtype).eps * exact[finite].abs().max()
        assert (mine.double() - exact)[finite].abs().max() <= 2 * worst + digits


# Loops ------------------------------------------------------------------------------------------


def check_rows(
    run: Run, columns: int, dtype: str, backward: bool = False, rows: int = 5, kind: str = "sum"
) -> None:
    x = (torch.randn(rows, columns, dtype=torch.float64) * 5).to(getattr(torch, dtype))
    if x.is_floating_point() and columns > 9:
        x[1, 3], x[2, 5], x[3, 2], x[3, columns - 2] = torch.inf, torch.nan, torch.inf, -torch.inf
    if kind == "prod":
        x = (torch.rand(rows, columns) * 0.2 + 0.4).to(x.dtype) if x.is_floating_point() else x
    b = torch.arange(columns).to(x.dtype)
    y = torch.full_like(x, 9)
    loop = loop_kernels.row_scan(S0, columns, dtype, kind, backward)
    run(loop, {"x": x, "b": b, "y": y}, {"s0": rows})
    exact = along(x.double() + x.double(), backward, kind) + b.double()
    wide = (x + x).float() if x.element_size() == 2 else x + x
    as_exact(y, (along(wide, backward, kind) + b).to(x.dtype), exact)


def check_columns(run: Run, shape: tuple[int, int, int], dtype: str, backward: bool) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * 5).to(getattr(torch, dtype))
    s, y = torch.full_like(x, 9), torch.full_like(x, 9)
    loop = loop_kernels.column_scan(S0, *shape[1:], dtype, backward)
    run(loop, {"x": x, "s": s, "y": y}, {"s0": shape[0]})
    exact = along(x.double(), backward)
    as_exact(s, along(x, backward), exact)
    wide = x.float() if x.element_size() == 2 else x
    as_exact(y, (along(wide, backward) - x).to(x.dtype), exact - x.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 37, 700])
def test_rows_on_the_host(dtype: str, columns: int) -> None:
    ways = [(each, backward) for each in DTYPES for backward in (False, True)]
    loops = tuple(
        loop_kernels.row_scan(S0, columns, each, "sum", backward) for each, backward in ways
    )
    for backward in (False, True):
        check_rows(functools.partial(loop_runs.run_among, loops), columns, dtype, backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [False, True])
def test_columns_on_the_host(dtype: str, backward: bool) -> None:
    for shape in ((3, 70, 37), (2, 1, 300)):
        ways = [(each, turn) for each in DTYPES for turn in (False, True)]
        loops = tuple(loop_kernels.column_scan(S0, *shape[1:], each, turn) for each, turn in ways)
        check_columns(functools.partial(loop_runs.run_among, loops), shape, dtype, backward)


def test_running_products() -> None:
    for run in (loop_runs.run, cuda_on_host.run):
        check_rows(run, 120, "float32", kind="prod")
        check_rows(run, 37, "int64", kind="prod", backward=True)


ROWS = (
    ("float32", 3, None),
    ("float32", 40, None),
    ("bfloat16", 2048, None),
    ("float16", 37, None),
    ("float64", 600, None),
    ("float32", 2500, Schedule("scan", 2, 64, unroll=2)),
    ("int64", 500, Schedule("scan", 1, 8, rows=4, unroll=3)),
    ("bfloat16", 500, Schedule("scan", 2, 32, rows=2, unroll=2)),
    ("float32", 2500, Schedule("scan", 2, 128, unroll=2, splits=4)),
    ("int64", 2500, Schedule("scan", 1, 64, unroll=1, splits=100)),
)
ROW_SCANS = tuple(
    (loop, schedule or choose(loop, CUDA, {"s0": 5}))
    for dtype, columns, schedule in ROWS
    for loop in (loop_kernels.row_scan(S0, columns, dtype, "sum", turn) for turn in (False, True))
)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("dtype", "columns", "schedule"), ROWS)
def test_emulated_rows(dtype: str, columns: int, schedule: Schedule | None, backward: bool) -> None:
    check_rows(
        lambda *given: cuda_on_host.run(*given, schedule, ROW_SCANS), columns, dtype, backward
    )


COLUMNS = (
    ("float32", (3, 70, 37), None),
    ("float16", (2, 1, 10), None),
    ("float32", (2, 300, 38), Schedule("scan_column", 2, 64, across=8, unroll=2)),
    ("int64", (2, 300, 19), Schedule("scan_column", 1, 64, across=16, unroll=3, splits=4)),
    ("bfloat16", (1, 100, 12), Schedule("scan_column", 2, 32, across=4, splits=64)),
)
COLUMN_SCANS = tuple(
    (loop, schedule or choose(loop, CUDA, {"s0": shape[0]}))
    for dtype, shape, schedule in COLUMNS
    for loop in (loop_kernels.column_scan(S0, *shape[1:], dtype, turn) for turn in (False, True))
)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("dtype", "shape", "schedule"), COLUMNS)
def test_emulated_columns(
    dtype: str, shape: tuple[int, int, int], schedule: Schedule | None, backward: bool
) -> None:
    check_columns(
        lambda *given: cuda_on_host.run(*given, schedule, COLUMN_SCANS), shape, dtype, backward
    )


@pytest.mark.parametrize("backward", [False, True])
def test_vectors_that_are_not_aligned_and_results_in_place(backward: bool) -> None:
    x, b = torch.randn(5, 1000), torch.randn(1000)
    loop = loop_kernels.row_scan(S0, 1000, backward=backward)
    exact = along(2 * x.double(), backward) + b
    for splits in (1, 5):
        schedule = Schedule("scan", 4, 64, unroll=2, splits=splits)
        given = unaligned(x)
        cuda_on_host.run(loop, {"x": given, "b": b, "y": given}, {"s0": 5}, schedule)
        close(given, exact, 1e-4)
        given = x.clone()
        cuda_on_host.run(loop, {"x": given, "b": b, "y": given}, {"s0": 5}, schedule)
        close(given, exact, 1e-4)


def test_two_runs_give_the_same_bits() -> None:
    x, b = torch.randn(3, 4000), torch.randn(4000)
    for run in (loop_runs.run, cuda_on_host.run):
        made = [torch.empty_like(x) for _ in range(2)]
        for y in made:
            run(loop_kernels.row_scan(S0, 4000), {"x": x, "b": b, "y": y}, {"s0": 3})
        assert torch.equal(*made)


def test_empty_rows_and_columns() -> None:
    for run in (loop_runs.run, cuda_on_host.run):
        nothing = torch.empty(0)
        run(loop_kernels.row_scan(S0, 0), {"x": nothing, "b": nothing, "y": nothing}, {"s0": 3})
        run(
            loop_kernels.row_scan(S0, 8),
            {"x": nothing, "b": torch.ones(8), "y": nothing},
            {"s0": 0},
        )
        run(
            loop_kernels.column_scan(S0, 4, 9),
            {"x": nothing, "s": nothing, "y": nothing},
            {"s0": 0},
        )


# Schedules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "rows", "kind", "splits"),
    [
        (loop_kernels.row_scan(S0, 8192), 2048, "scan", False),
        (loop_kernels.row_scan(S0, 1 << 20), 1, "scan", True),
        (loop_kernels.column_scan(S0, 2048, 512), 16, "scan_column", False),
        (loop_kernels.column_scan(S0, 65536, 64), 1, "scan_column", True),
        (loop_kernels.column_scan(S0, 65536, 3), 1, "scan", True),
    ],
)
def test_which_schedules_are_chosen(loop: LoopKernel, rows: int, kind: str, splits: bool) -> None:
    picked = choose(loop, CUDA, {"s0": rows})
    assert picked.kind == kind and (picked.splits > 1) == splits
    host = choose(loop, Target.host(), {"s0": rows})
    assert host.kind == kind and host.splits == 1


def test_which_schedules_are_legal() -> None:
    loop = loop_kernels.row_scan(S0, 8192)
    assert legal(loop, Schedule("scan", 4, 256, unroll=4), CUDA)
    assert not legal(loop, Schedule("scan", 4, 256, unroll=8), CUDA), "64 totals for one warp"
    assert not legal(loop, Schedule("scan", 4, 32, rows=4, splits=2), CUDA)
    assert not legal(loop, Schedule("row", 4, 256), CUDA)
    assert not legal(loop_kernels.softmax(S0, 64), Schedule("scan", 4, 64), CUDA)


def test_a_reduction_without_a_scan_is_refused() -> None:
    with pytest.raises(CodegenError, match=r"scan 'max' .* is not supported"):
        value_dtypes(loop_kernels.row_scan(S0, 8, kind="max"))


# Models -----------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "rows": (lambda x: x.cumsum(-1), torch.randn(7, 40)),
    "in a chain": (lambda x: ((x * (x > 0)).cumsum(1) * 0.1).tanh() + x, torch.randn(7, 300)),
    "first dimension": (lambda x: x.cumsum(0), torch.randn(300, 9)),
    "between others": (lambda x: x.cumsum(1).exp(), torch.randn(4, 20, 30) * 0.1),
    "after a softmax": (lambda x: x.softmax(1).cumsum(1), torch.randn(7, 40)),
    "before a sum": (lambda x: x.cumsum(1).sum(1), torch.randn(7, 40)),
    "twice": (lambda x: x.cumsum(1).cumsum(1), torch.randn(7, 40)),
    "both ways": (lambda x: x.cumsum(1) * x.flip(1).cumsum(1).flip(1), torch.randn(7, 40)),
    "two of them": (lambda x: x.cumsum(1) / (x * x + 1).cumsum(1), torch.randn(7, 40)),
    "across": (lambda x: x.cumsum(0) + x.cumsum(1), torch.randn(30, 40)),
    "transposed": (lambda x: x.mT.cumsum(1).relu(), torch.randn(30, 40)),
    "sliced": (lambda x: x[:, 1::2].cumsum(1)[:, 3:], torch.randn(7, 41)),
    "reshaped": (lambda x: x.view(-1, 6, 10).flatten(1).cumsum(1), torch.randn(7, 60)),
    "cut after": (lambda x: x.cumsum(1).view(-1, 6, 10) * 2, torch.randn(7, 60)),
    "of all": (lambda x: x.flatten().cumsum(0), torch.randn(7, 60)),
    "of ones": (lambda x: torch.ones_like(x).cumsum(1) * x, torch.randn(7, 60)),
    "of a row": (lambda x: x[:, :1].expand(-1, 9).cumsum(1), torch.randn(7, 60)),
    "of one": (lambda x: x.cumsum(1), torch.randn(7, 1)),
    "of a number": (lambda x: x.sum().cumsum(0), torch.randn(7)),
    "exclusive": (lambda x: x.cumsum(1) - x, torch.randn(7, 60)),
    "float64": (lambda x: x.cumsum(1), torch.randn(40, 9).double()),
    "bfloat16": (lambda x: (x * 3).cumsum(1), torch.randn(9, 40).bfloat16()),
    "float16": (lambda x: x.cumsum(0), torch.randn(40, 9).half()),
    "widened": (lambda x: x.cumsum(1, dtype=torch.float32), torch.randn(40, 9).half()),
    "prod": (lambda x: (x * 0.1 + 1).cumprod(1), torch.randn(9, 40)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_models_and_their_gradients(name: str) -> None:
    function, x = FUNCTIONS[name]
    model = Lambda(function)
    hold(fusewright.optimize(model, x, modes=("train",)), model, x)


def hold(fast: nn.Module, model: nn.Module, x: Tensor) -> None:
    for given in (x, torch.cat([x, x[:3]])) if x.shape[0] > 3 else (x,):
        runs = [(fast, given), (model, given), (model, given.double())]
        ours, eager, exact = (trained(each, one) for each, one in runs)
        for mine, theirs, truth in zip(ours, eager, exact, strict=True):
            assert mine.dtype == theirs.dtype
            digits = 16 * torch.finfo(mine.dtype).eps * truth.abs().max()
            error = 2 * (theirs.double() - truth).abs().max() + digits
            assert (mine.double() - truth).abs().max() <= error


@pytest.mark.parametrize(
    "name", ["in a chain", "between others", "both ways", "bfloat16", "of all"]
)
def test_emulated_models(name: str) -> None:
    function, x = FUNCTIONS[name]
    model = Lambda(function)
    found = prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)
    hold(on_library(model, x, found, cuda_on_host.emulated(found.source)), model, x)


def test_integers_and_booleans() -> None:
    whole = torch.randint(-9, 9, (5, 80))
    for x, function in (
        (whole, lambda x: x.cumsum(1)),
        (whole.int(), lambda x: (x + 1).cumsum(0)),
        (whole > 0, lambda x: x.cumsum(1)),
        (whole > 0, lambda x: x.cumsum(1, dtype=torch.int32) * 2),
        (whole, lambda x: x.cumsum(1, dtype=torch.float32)),
        (whole, lambda x: (x * 25).cumsum(1, dtype=torch.int8)),
        (whole, lambda x: x.cumprod(1)),
    ):
        model = Lambda(function)
        fast = fusewright.optimize(model, x, modes=("train",))
        mine, eager = fast(x), model(x)
        assert mine.dtype == eager.dtype and torch.equal(mine, eager)
        assert torch.equal(fast(x[:0]), model(x[:0]))


def test_special_values_are_eagers() -> None:
    x = torch.randn(8, 100)
    x[0, 5], x[1, 7], x[2, 3], x[2, 9] = torch.inf, torch.nan, torch.inf, -torch.inf
    x[3], x[4, :2] = -0.0, torch.tensor([3e38, 3e38])
    model = Lambda(lambda x: x.cumsum(1))
    mine, eager = fusewright.optimize(model, x, modes=("train",))(x), model(x)
    torch.testing.assert_close(mine, eager, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mine[3].signbit(), eager[3].signbit())


# Plans ------------------------------------------------------------------------------------------


def planned(function: Callable[[Tensor], Tensor], x: Tensor, part: str = "inference") -> Plan:
    made: Plan = getattr(plans_of(function, x), part)
    return made


@functools.cache
def plans_of(function: Callable[[Tensor], Tensor], x: Tensor) -> ProgramPlans:
    return prepare(Lambda(function), (x,), modes=("train",), device=x.device).modes[0]


@pytest.mark.parametrize("part", ["inference", "forward", "backward"])
@pytest.mark.parametrize("name", ["rows", "in a chain", "between others", "two of them", "widened"])
def test_each_scan_is_one_kernel(name: str, part: str) -> None:
    found = planned(*FUNCTIONS[name], part)
    assert [step.kind for step in found.steps] == ["loop"]


@pytest.mark.parametrize(
    ("name", "kernels"), [("twice", 2), ("both ways", 2), ("before a sum", 2), ("across", 2)]
)
def test_a_value_of_the_whole_row_needs_another_kernel(name: str, kernels: int) -> None:
    found = planned(*FUNCTIONS[name])
    assert len(steps_of(found, "loop")) == kernels and not any(
        isinstance(x, Call) for x in found.steps
    )


def test_backward_runs_from_the_other_end() -> None:
    (loop,) = steps_of(planned(lambda x: x.cumsum(1), torch.randn(7, 40), "backward"), "loop")
    (scan,) = (item for item in loop.kernel.body if isinstance(item, Scan))
    assert scan.backward and loop.operators == ("cumsum",)


def test_a_flip_stays_a_visible_call() -> None:
    found = planned(lambda x: x.flip(1).cumsum(1), torch.randn(7, 40))
    assert [step.name for step in found.steps if isinstance(step, Call)] == ["flip"]


def test_every_stage_computes_the_same() -> None:
    x = torch.randn(7, 40)
    for name in ("both ways", "prod"):
        model = Lambda(FUNCTIONS[name][0])
        program = fusewright.capture.capture(model, (x,), mode="eval")
        graph = fusewright.rewrite.rewrite(program).inference
        (made,) = interpret(graph, [x], program.example_sizes)
        torch.testing.assert_close(made, model(x.double()), rtol=1e-14, atol=1e-14)
