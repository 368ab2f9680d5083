"""log Σ e^x as one reduction: its special values, where it is planned, and matmuls that end in
it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fusewright
from benchmarks import loop_kernels
from fusewright.codegen.form import value_dtypes
from fusewright.compile.pipeline import prepare
from fusewright.errors import CodegenError
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import Dim
from fusewright.ir.interpret import interpret
from fusewright.ir.loop import LoopKernel, Reduce
from fusewright.plan import plan
from fusewright.plan.show import show
from fusewright.plan.steps import Plan
from fusewright.rewrite import matmuls
from fusewright.schedule.choice import Schedule
from fusewright.target.target import Target
from tests.support import cuda_on_host, loop_inputs, loop_runs
from tests.support.emulated_modules import INFERRED, trained, use_tensor_cores
from tests.support.models import Lambda
from tests.support.plans import steps_of
from tests.support.reduced_matmuls import Layer, emulated

S0 = Dim(1, ("s0",))
FUSED_REDUCTIONS = Target.cuda(trials=("fused_reductions",))
DTYPES = ("float16", "bfloat16", "float32", "float64")
Forward = Callable[[nn.Module, Tensor], object]


def same(mine: Tensor, eager: Tensor, exact: Tensor, terms: int) -> None:
    """Special values as in eager; elsewhere at most twice its error and four units of its
    precision. float64 is summed plainly, and only eager's result is there to compare with."""
    assert mine.dtype == eager.dtype and mine.shape == eager.shape
    finite = exact.isfinite() & eager.isfinite()
    assert torch.equal(mine.isnan(), eager.isnan())
    assert torch.equal(mine[~finite].nan_to_num(), eager[~finite].nan_to_num())
    digits = (terms if mine.dtype == torch.float64 else 1) * torch.finfo(mine.dtype).eps
    allowed = 2 * (eager.double() - exact).abs() + 4 * digits * exact.abs() + digits
    assert bool(((mine.double() - exact).abs() <= allowed)[finite].all())


# The reduction, in loops ------------------------------------------------------------------------


def reduced(columns: int, dtype: str, down: bool) -> LoopKernel:
    return (
        loop_kernels.column_logsumexp(S0, 16, dtype)
        if down
        else loop_kernels.row_logsumexp(S0, columns, dtype)
    )


def check(
    run: Callable[[LoopKernel, dict[str, Tensor], dict[str, int]], object],
    columns: int,
    dtype: str,
    down: bool,
) -> None:
    rows = loop_inputs.hard_rows(columns, dtype)
    x, y = rows.T.contiguous() if down else rows, torch.empty(16, dtype=rows.dtype)
    sizes = {"s0": columns if down else 16}
    run(reduced(columns, dtype, down), {"x": x, "y": y}, sizes)
    same(y, rows.logsumexp(1), rows.double().logsumexp(1), columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [10, 37, 700])
@pytest.mark.parametrize("down", [False, True])
def test_special_values_on_the_host(dtype: str, columns: int, down: bool) -> None:
    loops = tuple(reduced(columns, each, down) for each in DTYPES)
    check(functools.partial(loop_runs.run_among, loops), columns, dtype, down)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("row", 1, 32, rows=4, unroll=2),
        Schedule("row", 2, 128, unroll=2),
        Schedule("row", 2, 64, unroll=1, splits=3),
    ],
)
def test_special_values_of_emulated_rows(dtype: str, schedule: Schedule) -> None:
    among = tuple((reduced(500, each, down=False), schedule) for each in DTYPES)
    check(lambda *given: cuda_on_host.run(*given, schedule, among), 500, dtype, down=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 5])
def test_special_values_of_emulated_columns(dtype: str, splits: int) -> None:
    schedule = Schedule("column", 2, 128, across=8, unroll=2, splits=splits)
    among = tuple((reduced(300, each, down=True), schedule) for each in DTYPES)
    check(lambda *given: cuda_on_host.run(*given, schedule, among), 300, dtype, down=True)


def test_an_empty_axis_gives_minus_infinity() -> None:
    for run in (loop_runs.run, cuda_on_host.run):
        for loop, sizes in (
            (loop_kernels.row_logsumexp(S0, 0), {"s0": 3}),
            (loop_kernels.column_logsumexp(S0, 3), {"s0": 0}),
        ):
            y = torch.zeros(3)
            run(loop, {"x": torch.empty(0), "y": y}, sizes)
            assert (y == -torch.inf).all()


def test_integers_are_refused() -> None:
    body = loop_kernels.row_logsumexp(S0, 8, "int32")
    with pytest.raises(CodegenError, match="logsumexp needs a float dtype"):
        value_dtypes(body)


# Models -----------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "rows": (lambda x: x.logsumexp(-1), torch.randn(7, 40)),
    "columns": (lambda x: (x * 2).logsumexp(0), torch.randn(300, 40)),
    "kept": (lambda x: x - x.logsumexp(1, keepdim=True), torch.randn(7, 40, 3)),
    "several": (lambda x: x.logsumexp((0, 2)), torch.randn(7, 5, 30)),
    "all": (lambda x: x.logsumexp((0, 1)), torch.randn(70, 50)),
    "of one": (lambda x: x.logsumexp(1), torch.randn(7, 1)),
    "float64": (lambda x: x.logsumexp(0), torch.randn(40, 9).double()),
    "bfloat16": (lambda x: (x * 3).logsumexp(0), torch.randn(40, 9).bfloat16()),
    "far away": (lambda x: (x * 1e4).logsumexp(0), torch.randn(40, 9)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_models_and_their_gradients(name: str) -> None:
    function, x = FUNCTIONS[name]
    model = Lambda(function)
    fast = fusewright.optimize(model, x, modes=("train",))
    runs = [(fast, x), (model, x), (model, x.double())]
    ours, eager, exact = (trained(each, given) for each, given in runs)
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        most = truth.double().abs().max()
        # For float64, only eager is there to compare with.
        digits = (16 if mine.dtype == truth.dtype else 4) * torch.finfo(mine.dtype).eps * most
        error = 2 * (theirs.double() - truth).abs().max() + digits
        assert (mine.double() - truth).abs().max() <= error


def test_integers_and_an_empty_batch() -> None:
    x = torch.randint(-9, 9, (5, 8))
    model = Lambda(lambda x: x.logsumexp(0))
    fast = fusewright.optimize(model, x, modes=("train",))
    same(fast(x), model(x), x.double().logsumexp(0), 5)
    nothing = fast(x[:0])
    assert nothing.dtype == torch.float32 and (nothing == -torch.inf).all()


# Plans ------------------------------------------------------------------------------------------


def planned(model: nn.Module, x: Tensor, target: Target) -> Plan:
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=target)
    return found.modes[0].inference


@pytest.mark.parametrize(
    ("target", "shape", "dim", "dtype", "whole"),
    [
        (Target.cuda(), (512, 256), 1, torch.float32, False),
        (Target.cuda(), (512, 256), 0, torch.float32, True),
        (Target.cuda(), (512, 40_000), 1, torch.float32, True),
        (Target.cuda(), (512, 256), (0, 1), torch.float32, True),
        (Target.host(), (512, 256), 0, torch.float32, False),
        (Target.host(), (512, 256), 0, torch.bfloat16, True),
        (Target.host(), (512, 256), 1, torch.bfloat16, False),
    ],
)
def test_loops_that_hold_their_rows_take_two_sweeps(
    target: Target, shape: tuple[int, ...], dim: int, dtype: torch.dtype, whole: bool
) -> None:
    """The host's loops do too, except where a maximum would be rounded to 16 bits between them."""
    x = torch.randn(shape).to(dtype)
    found = planned(Lambda(lambda x: (x + 1).logsumexp(dim)), x, target)
    loops = [step for step in found.steps if step.kind == "loop"]
    words = {word for loop in loops for word in loop.operators}
    assert words & {"logsumexp", "max"} == {"logsumexp" if whole else "max"}
    if whole:
        assert len(loops) == 1 and loops[0].bytes_moved < 1.1 * x.nbytes


@pytest.fixture
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    use_tensor_cores(monkeypatch)


@pytest.mark.usefixtures("small_ones_too")
def test_a_matmul_ends_in_it_only_on_trial() -> None:
    model = Layer(lambda m, x: m.linear(x).logsumexp(-1), 256, 128)  # type: ignore[operator]
    found = planned(model, torch.randn(512, 128), Target.cuda())
    assert [step.kind for step in found.steps if step.kind in ("matmul", "loop")] == [
        "loop",  # which splits the weights
        "matmul",
        "loop",
    ]


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize(("dim", "reduces"), [(-1, Reduces.ACROSS), (0, Reduces.DOWN)])
def test_a_matmul_that_ends_in_it_writes_nothing_else(dim: int, reduces: Reduces) -> None:
    model = Layer(lambda m, x: m.linear(x).logsumexp(dim), 256, 128)  # type: ignore[operator]
    x = torch.randn(512, 128)
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=FUSED_REDUCTIONS)
    inference = found.modes[0].inference
    (step,) = (each for each in inference.steps if each.kind == "matmul")
    specs = dict(inference.specs)
    assert step.kernel.reduces is reduces and step.operators == ("mm", "add", "logsumexp")
    assert [len(specs[each].shape) for each in step.outputs] == [1]
    assert "mm → add → logsumexp" in show(found.modes[0])
    target = replace(FUSED_REDUCTIONS, tensor_cores=False)
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=target)
    plain = [each for each in found.modes[0].inference.steps if each.kind == "loop"]
    assert len(plain) == 1, "one loop follows PyTorch's matmul"


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize(
    ("dim", "reduces"),
    [(1, Reduces.DOWN), ((2, 3), Reduces.ACROSS), ((0, 2, 3), Reduces.ACROSS)],
)
def test_a_convolution_ends_in_it(dim: int, reduces: Reduces) -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), Lambda(lambda x: x.logsumexp(dim)))
    found = planned(model, torch.randn(16, 64, 16, 16), FUSED_REDUCTIONS)
    (step,) = found.steps
    assert step.kind == "convolution" and step.kernel.reduces is reduces
    assert step.operators == ("convolution", "add", "logsumexp")


def test_both_forms_mean_the_same() -> None:
    x = torch.randn(30, 20)
    program = fusewright.capture.capture(Lambda(lambda x: x.logsumexp(0)), (x,), mode="eval")
    graph = fusewright.rewrite.rewrite(program).inference
    sizes = program.example_sizes
    (reduced,) = (node for node in graph.nodes if node.op == "reduce_logsumexp")
    apart = fusewright.plan.logsumexps.in_two_sweeps(graph, frozenset({reduced.name}))
    assert not any(node.op == "reduce_logsumexp" for node in apart.nodes)
    exact = x.double().logsumexp(0)
    for each in (graph, apart):
        torch.testing.assert_close(interpret(each, [x], sizes)[0], exact, rtol=1e-14, atol=0)
    kernels = [step.kernel for step in steps_of(plan(graph, sizes, Target("cuda")), "loop")]
    assert [i.kind for i in kernels[0].body if isinstance(i, Reduce)] == ["logsumexp"]


# Matmuls that end in it -------------------------------------------------------------------------


def row_powers(m: nn.Module, x: Tensor) -> Tensor:
    return m.linear(x).logsumexp(-1)  # type: ignore[operator,no-any-return]


def column_powers(m: nn.Module, x: Tensor) -> Tensor:
    return m.linear(x).logsumexp(0)  # type: ignore[operator,no-any-return]


def both_powers(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return row_powers(m, x), column_powers(m, x * 2)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(300, 132), (129, 257)])
def test_emulated_matmuls_keep_the_special_values(
    dtype: torch.dtype, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns of the result are infinite, NaN or far away. Eager's matmul rounds where
    ours does not, so both are compared with a float64 one."""
    model = Layer(both_powers, columns, 40).to(dtype)
    fast, _ = emulated(model, [torch.randn(rows, 40).to(dtype)], monkeypatch, INFERRED)
    for scale in (1.0, 1e3):
        x = (torch.randn(rows, 40) * scale).clamp(-6e4, 6e4).to(dtype)
        x[3, 5], x[7, 1], x[rows - 1, 2] = torch.inf, torch.nan, -torch.inf
        exactly = Layer(both_powers, columns, 40).double()
        exactly.load_state_dict(model.state_dict())
        with torch.no_grad():
            ours, eager, exact = fast(x), model(x), exactly(x.double())
        for mine, theirs, truth in zip(ours, eager, exact, strict=True):
            finite = truth.isfinite() & theirs.isfinite()
            assert torch.equal(mine.isnan(), theirs.isnan()) and mine.dtype == dtype
            error = lambda y: (y.double() - truth)[finite].abs().max()  # noqa: B023, E731
            if bool(finite.any()):
                digits = 8 * torch.finfo(dtype).eps * truth[finite].abs().max()
                assert error(mine) <= 2 * error(theirs) + digits
