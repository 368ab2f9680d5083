"""Our matmuls: how graphs are rewritten and planned, and what the plans compute."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen import matmul as matmul_text
from fusewright.compile.pipeline import prepare
from fusewright.cost import matmul as product_cost
from fusewright.cost.break_even import least_size
from fusewright.cost.matmul import (
    TF32,
    best_us,
    is_worthwhile,
    multiplied_as,
    parts_of,
    pytorch_us,
)
from fusewright.ir import interpret as oracle
from fusewright.ir.graph import Dim, Program
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import Extents, RawOperand
from fusewright.kinds.matmul import MATMUL
from fusewright.kinds.registry import render
from fusewright.plan import plan
from fusewright.plan.steps import Call, Plan
from fusewright.rewrite import matmuls, rewrite
from fusewright.runtime import tensor_cores
from fusewright.schedule.loops import choose
from fusewright.schedule.tensor_core import choose_matmul
from fusewright.target.target import Target
from tests.support import loop_runs
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import as_exact_as_eager, on_library
from tests.support.models import ParametricLambda
from tests.support.plans import input_values, steps_of
from tests.support.stubs import MATMUL_STUB

CUDA = Target.cuda()

ROWS, INSIDE, COLUMNS = 1024, 1024, 1024


def linear(columns: int = COLUMNS, inside: int = INSIDE) -> dict[str, Tensor]:
    return {"weight": torch.randn(columns, inside) / 32, "bias": torch.randn(columns)}


def rewritten(function, *args: Tensor, **parameters: Tensor) -> Program:  # type: ignore[no-untyped-def]
    program = rewrite(capture(ParametricLambda(function, **parameters), args, mode="train"))
    sizes = program.example_sizes
    assert program.backward is not None
    return replace(
        program,
        forward=matmuls.with_matmuls(program.forward, sizes, CUDA),
        inference=matmuls.with_matmuls(program.inference, sizes, CUDA),
        backward=matmuls.with_matmuls(program.backward, sizes, CUDA),
    )


def plans(function, *args: Tensor, **parameters: Tensor) -> tuple[Plan, Plan, Plan]:  # type: ignore[no-untyped-def]
    program = rewritten(function, *args, **parameters)
    sizes = program.example_sizes
    assert program.backward is not None
    inference, forward, backward = (
        plan(each, sizes, Target.host())
        for each in (program.inference, program.forward, program.backward)
    )
    return inference, forward, backward


def words(each: Plan) -> list[tuple[str, ...]]:
    return [step.operators for step in each.steps if not hasattr(step, "node")]


def outputs(each: Plan) -> list[str]:
    """The values written to memory, with their types."""
    specs = dict(each.specs)
    return [f"{name}:{specs[name].dtype}" for step in each.kernels for name in step.outputs]


def relu_layer(m: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(F.linear(x, m.weight, m.bias))  # type: ignore[arg-type]


# Planning -------------------------------------------------------------------------------------


def test_a_linear_layer_with_relu() -> None:
    inference, forward, backward = plans(relu_layer, torch.randn(ROWS, INSIDE), **linear())
    assert words(inference) == [("split",), ("mm", "add", "relu")]
    assert words(forward) == [("split",), ("mm", "add", "relu", "le")]
    assert [step.name for step in inference.steps] == ["custom_split", "custom_mm_add_relu"]
    assert words(backward) == [("where", "split"), ("mm",), ("mm",), ("where", "sum")]
    # The gradient of the layer's result is in memory as high and low parts only.
    assert sorted(outputs(backward)) == [
        "mm:float32",
        "mm_1:float32",
        "sum_1:float32",
        "where_hi:float16",
        "where_inverse:float32",
        "where_lo:float16",
    ]


def test_a_single_matrix_has_no_batch_stride() -> None:
    """A view may have an odd one, with which the copy engine could not read it."""

    def alone(m: nn.Module, x: Tensor) -> Tensor:
        single = m.weight.unsqueeze(-1).permute(2, 0, 1)  # type: ignore[operator]
        assert single.stride() == (1, 768, 1)
        return torch.bmm(x.unsqueeze(0), single)

    inference, _, _ = plans(alone, torch.randn(4096, 1024), weight=torch.randn(1024, 768))
    (only,) = steps_of(inference, "matmul")
    assert only.kernel.a.batch_stride == Dim(0) and only.kernel.a.contracted_stride == Dim(768)


def test_an_epilogue_over_one_matrix_divides_no_indices() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 768))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bijl,lk->bijk", x, self.weight)

    x = torch.randn(8, 64, 16, 256)
    made = prepare(Alone(), (x,), modes=("eval",), device=x.device, target=Target.cuda())
    assert steps_of(made.modes[0].inference, "matmul")
    body = made.source.text.split("struct custom_mm_shape")[1].split("\n};")[0]
    assert "fw::over" not in body and "fw::rest" not in body


def test_all_three_matmuls_read_their_operands_without_a_copy() -> None:
    rows = 2048
    _, forward, backward = plans(relu_layer, torch.randn(rows, INSIDE), **linear(768))
    (y,) = steps_of(forward, "matmul")
    dx, dw = steps_of(backward, "matmul")
    batch = y.kernel.rows
    assert not batch.is_static
    assert (y.kernel.columns, y.kernel.contracted) == (Dim(768), Dim(INSIDE))
    assert (y.kernel.a.free_stride, y.kernel.a.contracted_stride) == (Dim(INSIDE), Dim(1))
    assert not y.kernel.b.contracted_rows
    assert (dx.kernel.a.free_stride, dx.kernel.a.contracted_stride) == (Dim(1), Dim(INSIDE))
    assert not dx.kernel.b.contracted_rows and dx.kernel.rows == batch
    assert dw.kernel.a.buffer in [
        each.name for each in backward.inputs
    ] and dw.kernel.a.free_stride == Dim(1)
    assert dw.kernel.b.contracted_rows and dw.kernel.contracted == batch
    assert dx.inputs[1:] == dw.inputs[1:], "the gradient is split once"
    assert y.operations == 2 * rows * INSIDE * 768 + rows * 768 * 3
    operands = 4 * INSIDE * (rows + 768) + 4 * rows
    assert y.bytes_moved == operands + 4 * 768 + rows * 768 * (4 + 1), "relu, and its mask"


def test_an_mlp_saves_what_backward_needs() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.relu(F.linear(x, m.weight, m.bias))  # type: ignore[arg-type]
        return F.linear(hidden, m.second, m.last)  # type: ignore[arg-type]

    more = {"second": torch.randn(COLUMNS, COLUMNS), "last": torch.randn(COLUMNS)}
    inference, forward, backward = plans(model, torch.randn(ROWS, INSIDE), **linear(), **more)
    ours = [("split",), ("mm", "add", "relu"), ("split",), ("mm", "add")]
    assert words(inference) == words(forward) == ours
    assert len(steps_of(backward, "matmul")) == 4 and not any(
        isinstance(s, Call) for s in backward.steps
    )
    # The gradient passes through relu before it is written: what is read later is that. The sum
    # over its columns is the first bias's gradient.
    assert ("mm", "le", "where", "sum") in words(backward)
    assert sum(step.operators[-1] == "split" for step in steps_of(backward, "loop")) == 2


def test_a_value_that_others_read_is_stored_beside_the_epilogue() -> None:
    def model(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, m.weight)  # type: ignore[arg-type]
        return y, torch.tanh(y)

    inference, _, _ = plans(model, torch.randn(ROWS, INSIDE), weight=linear()["weight"])
    (step,) = steps_of(inference, "matmul")
    assert step.operators == ("mm", "tanh") and len(step.outputs) == 2
    assert set(step.outputs) == {each for each in inference.outputs if isinstance(each, str)}


def test_three_dimensional_inputs() -> None:
    inference, forward, _ = plans(relu_layer, torch.randn(8, ROWS // 8, INSIDE), **linear())
    assert words(inference) == [("split",), ("mm", "add", "relu")]
    assert len(steps_of(forward, "matmul")[0].kernel.epilogue.outer) == 3


def attention(m: nn.Module, x: Tensor) -> Tensor:
    """Batched matmuls: one with a transposed operand, one with an operand that all share."""
    scores = torch.relu(x @ x.transpose(1, 2) * m.scale)  # type: ignore[operator]
    return torch.tanh(scores @ m.values.expand(x.shape[0], -1, -1))  # type: ignore[operator]


def test_batched_matmuls() -> None:
    given = {"scale": torch.randn(()), "values": torch.randn(1024, 768)}
    inference, _, backward = plans(attention, torch.randn(8, 1024, 512), **given)
    scores, result = steps_of(inference, "matmul")
    assert scores.operators == ("bmm", "mul", "relu") and result.operators == ("bmm", "tanh")
    assert scores.kernel.batches == result.kernel.batches and not scores.kernel.batches.is_static
    assert scores.kernel.a.batch_stride == Dim(1024 * 512) and not scores.kernel.a.free_major
    assert result.kernel.a.batch_stride == Dim(0) and result.kernel.a.free_major
    rows = 8 * 1024
    assert scores.operations == 2 * rows * 1024 * 512 + 2 * rows * 1024
    assert result.bytes_moved == 4 * (rows * 1024 + 1024 * 768 + rows + rows * 768)
    assert len(steps_of(backward, "matmul")) == 4 and not any(
        isinstance(s, Call) for s in backward.steps
    )


def softmax_after(m: nn.Module, x: Tensor) -> Tensor:
    return torch.softmax(F.linear(x, m.weight, m.bias), -1)  # type: ignore[arg-type]


def transposed_after(m: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(F.linear(x, m.weight).t() + m.bias[:, None])  # type: ignore[arg-type,index]


def halved_columns_after(m: nn.Module, x: Tensor) -> Tensor:
    y = F.linear(x, m.weight)  # type: ignore[arg-type]
    return torch.relu(y[:, ::2])


def test_a_transposed_result_is_a_matmul_of_transposed_operands() -> None:
    inference, _, _ = plans(transposed_after, torch.randn(ROWS, INSIDE), **linear())
    assert [step.kind for step in inference.kernels] == ["loop", "matmul"]


@pytest.mark.parametrize("model", [softmax_after, halved_columns_after])
def test_what_no_epilogue_can_compute_stays_a_loop(model) -> None:  # type: ignore[no-untyped-def]
    inference, _, _ = plans(model, torch.randn(ROWS, INSIDE), **linear())
    kinds = [step.kind for step in inference.kernels]
    assert kinds == ["loop", "matmul", "loop"]


def test_batch_norm_takes_its_statistics_from_the_epilogue() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        y = F.linear(x, m.weight, m.bias)  # type: ignore[arg-type]
        return torch.relu(F.batch_norm(y, None, None, training=True))

    inference, _, _ = plans(model, torch.randn(ROWS, INSIDE), **linear())
    (step,) = steps_of(inference, "matmul")
    assert step.operators[:3] == ("mm", "add", "var_mean") and "relu" not in step.operators
    assert any("relu" in loop.operators for loop in steps_of(inference, "loop"))
    assert not any("var_mean" in loop.operators for loop in steps_of(inference, "loop"))


def test_an_epilogue_is_no_longer_than_its_registers_allow() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        y = F.linear(x, m.weight)  # type: ignore[arg-type]
        for _ in range(70):
            y = torch.sin(y) + y
        return y

    inference, _, _ = plans(model, torch.randn(ROWS, INSIDE), weight=linear()["weight"])
    (step,) = steps_of(inference, "matmul")
    assert 30 <= len(step.operators) <= 61 and len(steps_of(inference, "loop")) == 2


def test_two_matmuls_in_one_sum_do_not_depend_on_each_other() -> None:
    def model(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.linear(x, m.weight), F.linear(x, m.second)  # type: ignore[arg-type]
        return torch.relu(a + b), torch.tanh(a * b)

    inference, _, _ = plans(
        model,
        torch.randn(ROWS, INSIDE),
        weight=torch.randn(1024, 1024),
        second=torch.randn(1024, 1024),
    )
    assert sorted(words(inference)) == [("mm",), ("mm", "add", "relu", "mul", "tanh"), ("split",)]


@pytest.mark.parametrize(
    ("function", "x", "word"),
    [
        (lambda m, x: x @ m.w, torch.randn(8, 32, 64), "batch"),
        (lambda m, x: x[0].half() @ m.w[0].half(), torch.randn(1, 2048, 1024), "float16"),
        (lambda m, x: x[0].double() @ m.w[0].double(), torch.randn(1, 2048, 1024), "float64"),
        (lambda m, x: x[0] @ m.w[0], torch.randn(1, 64, 64), "at this size"),
    ],
)
def test_a_matmul_left_to_pytorch_says_why(function, x: Tensor, word: str) -> None:  # type: ignore[no-untyped-def]
    w = torch.randn(x.shape[0], x.shape[2], 1024)
    program = rewritten(function, x, w=w)
    inference = plan(program.inference, program.example_sizes, CUDA)
    (call,) = [step for step in inference.steps if isinstance(step, Call)]
    assert word in call.reason and not steps_of(inference, "matmul")


@pytest.mark.parametrize(
    ("sizes", "ours"),
    [
        ((1024, 8192, 8192), True),
        ((128, 16384, 16384), True),
        ((16384, 16384, 128), True),  # the gradient of a weight, from a small batch
        ((4096, 1024, 1024), True),
        ((512, 512, 512), False),
        ((16, 4096, 4096), False),
        ((1, 1 << 16, 1 << 10), False),
        ((1 << 16, 1 << 16, 1), False),
    ],
)
def test_matmuls_are_ours_where_that_pays(sizes: tuple[int, int, int], ours: bool) -> None:
    assert is_worthwhile(Extents(*sizes), "float32", CUDA) == ours


# PyTorch's time over ours where both round to TF32, on an H200.
MEASURED_TF32 = {
    (512, 512, 512): 0.59,
    (1024, 1024, 1024): 0.74,
    (2048, 2048, 2048): 0.97,
    (4096, 4096, 4096): 1.29,
    (128, 4096, 4096): 0.76,
    (1024, 4096, 4096): 0.83,
    (2048, 4096, 4096): 1.17,
    (16384, 512, 512): 0.62,
    (1024, 8192, 8192): 1.18,
    (4096, 4096, 512): 0.85,
}


@pytest.mark.parametrize("sizes", MEASURED_TF32)
def test_where_tf32_is_allowed_cublas_is_faster_too(sizes: tuple[int, int, int]) -> None:
    of = Extents(*sizes)
    target = Target.cuda(tf32=True)
    assert multiplied_as("float32", target) == TF32
    assert is_worthwhile(of, TF32, target) == (MEASURED_TF32[sizes] > 1)
    predicted = pytorch_us(of, target, TF32) / best_us(of, target, TF32)
    assert 0.45 < predicted / MEASURED_TF32[sizes] < 1.2


def test_few_tiles_are_shared() -> None:
    """By as many processors as each can have. A part has eight blocks or more."""
    assert parts_of(Extents(128, 4096, 4096), 128, CUDA) == 4
    assert parts_of(Extents(128, 128, 4096), 128, CUDA) == 8
    assert parts_of(Extents(512, 512, 512), 128, CUDA) == 1
    assert parts_of(Extents(4096, 4096, 4096), 176, CUDA) == 1
    # H200: SGEMM 103 and 185 µs, ours 41.8 and 58.5 with tiles shared, 81 and 83 before.
    for rows, us in ((128, 41.8), (256, 58.5)):
        assert 0.9 < best_us(Extents(rows, 4096, 4096), CUDA) / us < 1.1


def test_matmuls_are_planned_for_the_precision_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def matmuls_of(rows: int) -> list[int]:
        model, x = ParametricLambda(relu_layer, **linear()), torch.randn(rows, INSIDE)
        targets = (Target.cuda(tf32=tf32) for tf32 in (False, True))
        made = [prepare(model, (x,), modes=("eval",), device=x.device, target=t) for t in targets]
        return [len(steps_of(each.modes[0].inference, "matmul")) for each in made]

    assert matmuls_of(ROWS) == [1, 0]
    monkeypatch.setitem(product_cost.PYTORCH_FLOPS_PER_US, TF32, 1e6)
    assert matmuls_of(ROWS) == [1, 1]


def test_small_batches_are_left_to_other_programs() -> None:
    model = ParametricLambda(relu_layer, **linear())
    example = (torch.randn(ROWS, INSIDE),)
    made = prepare(model, example, device=torch.device("cpu"), target=Target.cuda())
    ours, _ = made.modes
    assert ours.worth is not None
    name, least = ours.worth
    assert name == "s0" and 1 < least <= ROWS
    assert ours.guards == (*ours.program.guards, f"s0 >= {least}")
    kernel = steps_of(ours.inference, "matmul")[0].kernel
    alone = least_size([partial(MATMUL.times_us, kernel, CUDA)], "s0", {"s0": ROWS})
    enough, too_few = (Extents(rows, COLUMNS, INSIDE) for rows in (alone, alone - 1))
    assert best_us(enough, CUDA) <= pytorch_us(enough, CUDA)
    assert best_us(too_few, CUDA) > pytorch_us(too_few, CUDA)


def test_a_kernel_that_two_graphs_share_is_written_once() -> None:
    model = ParametricLambda(relu_layer, **linear())
    made = prepare(
        model, (torch.randn(ROWS, INSIDE),), device=torch.device("cpu"), target=Target.cuda()
    )
    names = [entry.name for entry in made.source.entries if entry.terms]
    assert names == ["custom_mm_add_relu_le", "custom_mm_add_relu", "custom_mm", "custom_mm_2"]
    train, evaluation = made.modes
    assert steps_of(train.inference, "matmul") == steps_of(evaluation.inference, "matmul")


def test_tiles_leave_little_of_the_last_wave_idle() -> None:
    inference, _, _ = plans(relu_layer, torch.randn(ROWS, INSIDE), **linear())
    kernel = steps_of(inference, "matmul")[0].kernel
    rows = {}
    for columns, batch in ((8192, 1024), (16384, 128), (8192, 8192), (2112, 1056)):
        sized = replace(kernel, columns=Dim(columns))
        rows[columns, batch] = choose_matmul(sized, Target.cuda(), {"s0": batch}).tile_rows
    assert rows == {(8192, 1024): 176, (16384, 128): 128, (8192, 8192): 176, (2112, 1056): 176}


def test_rows_of_split_operands_are_padded_to_16_bytes() -> None:
    inference, _, _ = plans(relu_layer, torch.randn(1100, 1001), **linear(1024, 1001))
    specs = dict(inference.specs)
    (step,) = steps_of(inference, "matmul")
    hi, lo = step.kernel.b.hi, step.kernel.b.lo
    assert specs[hi].strides == specs[lo].strides == (Dim(1008), Dim(1))
    assert step.kernel.b.row_stride == Dim(1008)
    (split,) = steps_of(inference, "loop")
    stores = [item for item in split.kernel.body if type(item).__name__ == "Store"]
    assert {each.access.strides for each in stores[:2]} == {(Dim(1008), Dim(1))}


# Meaning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "shape"), [(relu_layer, (24, 40)), (relu_layer, (3, 8, 40)), (attention, (3, 12, 40))]
)
def test_the_rewritten_graphs_mean_the_same(  # type: ignore[no-untyped-def]
    model, shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    x, parameters = torch.randn(shape), linear(33, 40)
    if model is attention:
        parameters = {"scale": torch.randn(()), "values": torch.randn(12, 24)}
    plain = rewrite(capture(ParametricLambda(model, **parameters), (x,), mode="train"))
    ours = rewritten(model, x, **parameters)
    sizes = plain.example_sizes
    for name in ("inference", "forward", "backward"):
        before, after = getattr(plain, name), getattr(ours, name)
        assert any(node.op == "matmul" for node in after.nodes)
        given = input_values(before, sizes)
        for exact, tolerance in ((False, 1e-12), (True, 2e-6)):
            theirs = oracle.interpret(before, given, sizes, exact=exact)
            mine = oracle.interpret(after, given, sizes, exact=exact)
            for a, b in zip(mine, theirs, strict=True):
                if isinstance(b, Tensor) and b.is_floating_point():
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 10)


def split_loop(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> LoopKernel:
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    inference, _, _ = plans(
        lambda m, x: x @ m.w, torch.randn(rows, columns), w=torch.randn(columns, 8)
    )
    (loop,) = steps_of(inference, "loop")
    return loop.kernel


@pytest.mark.parametrize(("rows", "columns"), [(5, 1001), (300, 64), (4, 3)])
@pytest.mark.parametrize("language", ["host", "cuda"])
def test_high_and_low_parts_hold_a_float(
    rows: int, columns: int, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hi + lo is each element to 2^-22 of the row's largest. Inf and NaN spoil no others."""
    loop = split_loop(rows, columns, monkeypatch)
    x = torch.randn(rows, columns) * torch.exp2(torch.linspace(-108, 120, rows))[:, None]
    x[0] = 0
    x[1, 1], x[2, 0], x[3, 2] = math.inf, math.nan, -math.inf
    room = torch.full((rows, -(-columns // 8) * 8), 7.0, dtype=torch.float16)
    hi, lo, inverse = room.clone(), room.clone(), torch.empty(rows)
    names = [each.name for each in loop.arguments]
    tensors = dict(zip(names, (x, hi, lo, inverse), strict=True))
    target = Target.host() if language == "host" else Target.cuda()
    sizes = dict.fromkeys(loop.symbols, rows)
    source = render([(loop, choose(loop, target, sizes))], target)
    flags = () if language == "host" else ("-O1", "-w")
    source = source if language == "host" else emulated(source)
    loop_runs.call(loop_runs.compile_source(source, flags), source, tensors, sizes, 1)
    assert (hi[:, columns:] == 7).all() and (lo[:, columns:] == 7).all(), "padding is not written"
    hi, lo = hi[:, :columns], lo[:, :columns]
    plain = x.isfinite()
    assert torch.equal(hi.isfinite(), plain)
    back = (hi.double() + lo.double()) * inverse.double()[:, None]
    largest = torch.where(plain, x, 0.0).abs().amax(1, keepdim=True).double()
    error = (back - x.double()).abs() / largest.clamp(min=2.0**-140)
    assert error[plain].max() <= 2.0**-22
    scaled = largest[:, 0] / inverse.double()
    assert ((scaled >= 2**14) & (scaled < 2**15)).equal(largest[:, 0] > 0)
    assert torch.equal(torch.frexp(inverse).mantissa, torch.full((rows,), 0.5))


class Layers(nn.Module):
    """Odd sizes, a three-dimensional input, an intermediate result that is given out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 27), nn.Linear(27, 13, bias=False)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.first(x)) * self.scale
        near = torch.sigmoid(hidden @ hidden.mT)
        return self.second(near @ hidden).softmax(-1), hidden


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_emulated_modules_train_as_eager_does(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emitted text over the CUDA source, with g++ for nvcc and three loops for the kernel."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    monkeypatch.setattr(matmul_text, "SPLIT_HEADER", str(MATMUL_STUB))
    monkeypatch.setattr(matmul_text, "HALF_HEADER", str(MATMUL_STUB))
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    model, x = Layers().to(kind), torch.randn(2, 3, 20).to(kind)
    target = Target.cuda(trials=("half_matmuls",))
    prepared = prepare(model, (x,), modes=("train",), device=x.device, target=target)
    (mode,) = prepared.modes
    kinds = {step.kind for step in mode.forward.kernels}
    assert kinds == {"loop", "matmul"}
    assert {bool(each.terms) for each in prepared.source.entries} == {False, dtype == "float32"}
    fast = on_library(model, x, prepared, emulated(prepared.source))
    for batch in (2, 3):
        as_exact_as_eager(fast, model, torch.randn(batch, 3, 20).to(kind), 1e-6)


def test_matmuls_in_16_bits_end_in_their_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    given = {name: each.bfloat16() for name, each in linear(4096).items()}
    x = torch.randn(2048, 1024).bfloat16()
    program = rewrite(capture(ParametricLambda(relu_layer, **given), (x,), mode="eval"))
    graph = matmuls.with_matmuls(
        program.inference, program.example_sizes, Target.cuda(trials=("half_matmuls",))
    )
    (step,) = plan(graph, program.example_sizes, Target.host()).steps
    assert step.kind == "matmul" and step.operators == ("mm", "add", "relu")
    assert isinstance(step.kernel.b, RawOperand) and not step.kernel.b.free_major
    assert step.bytes_moved == 2 * ((2048 + 4096) * 1024 + 4096 + 2048 * 4096)
    without = matmuls.with_matmuls(program.inference, program.example_sizes, CUDA)
    assert not steps_of(plan(without, program.example_sizes, Target.host()), "matmul")
