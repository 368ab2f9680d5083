"""Axes, schedules and their resources, by their numbers. tests/codegen runs the results."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks import loop_kernels
from benchmarks.loop_kernels import access, kernel
from fusewright.compile.pipeline import prepare
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Apply, Instruction, Load, LoopKernel, Reduce, Store
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.coalesce import coalesce
from fusewright.schedule.half_precision import half_precision_values
from fusewright.schedule.loops import choose, legal, workspace_bytes
from fusewright.schedule.row_cache import cache_values, row_registers
from fusewright.schedule.sweeps import sweeps
from fusewright.target.facts import H200
from fusewright.target.target import Target
from tests.support.loop_runs import run
from tests.support.plans import steps_of

S0 = Dim(1, ("s0",))
CUDA = Target.cuda()


def test_coalesce_merges_orders_and_drops() -> None:
    body = [
        Load("x", "float32", access("x", 1, 20, 0, 4)),
        Store("x", "float32", access("y", 1, 20, 0, 4)),
    ]
    loop = kernel("nhwc", [4, 6, 1, 5], [], {"x": "float32"}, {"y": "float32"}, body)
    small = coalesce(loop)
    assert [axis.size for axis in small.outer] == [Dim(120)]
    assert small.body[0] == Load("x", "float32", access("x", 1))
    assert coalesce(small) == small
    assert len(coalesce(loop_kernels.bias_relu(8, 16)).outer) == 2


def test_channels_last_input_reduces_by_column() -> None:
    """Sum over N, H, W of a channels-last tensor: the channel axis is contiguous."""
    body = [
        Load("x", "float32", access("x", 1, 60, 3)),
        Reduce("y", "float32", "sum", "x"),
        Store("y", "float32", access("y", 1, 0, 0)),
    ]
    loop = kernel("nhwc_sum", [3], [7, 20], {"x": "float32"}, {"y": "float32"}, body)
    assert choose(loop, CUDA, {}).kind == "column"
    x, y = torch.randn(7, 20, 3), torch.empty(3)
    run(loop, {"x": x, "y": y})
    torch.testing.assert_close(y.double(), x.double().sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_a_thread_computes_several_windows() -> None:
    """Adjacent windows share most loads. Loads of as many different tensors would wait for
    memory."""
    sizes = [1 << 20, 99]

    def picked(buffers: int) -> int:
        names = [f"x{at % buffers}" for at in range(6)]
        loads = [
            Load(f"t{at}", "float32", access(name, 128, 1, offset=(at,)))
            for at, name in enumerate(names)
        ]
        total = Apply("y", "float32", "add", ("t0", "t5"))
        body = [*loads, total, Store("y", "float32", access("y", 99, 1))]
        given = dict.fromkeys(dict.fromkeys(names), "float32")
        return choose(kernel("windows", sizes, [], given, {"y": "float32"}, body), CUDA, {}).unroll

    assert picked(buffers=1) == 4
    assert picked(buffers=6) == 1


def test_schedule_choices_and_workspace() -> None:
    sizes = {"s0": 1 << 26}
    assert choose(loop_kernels.add_relu(S0), CUDA, sizes) == Schedule("pointwise", 4, 256)
    whole = loop_kernels.full_sum(S0)
    picked = choose(whole, CUDA, sizes)
    assert picked.kind == "row" and picked.splits > 132
    assert workspace_bytes(whole, picked, CUDA) == Dim(8 * picked.splits)
    column = loop_kernels.column_sum(S0, 8192)
    picked = choose(column, CUDA, {"s0": 16384})
    assert picked.kind == "column" and picked.splits > 1
    assert workspace_bytes(column, picked, CUDA) == Dim(8 * 8192 * picked.splits)
    assert choose(loop_kernels.softmax(S0, 1024), CUDA, {"s0": 64}).cached
    assert not choose(loop_kernels.softmax(S0, 2_000_000), CUDA, {"s0": 64}).cached


def test_which_schedules_are_legal() -> None:
    loop = loop_kernels.softmax(S0, 1024)
    assert legal(loop, Schedule("row", 4, 32, rows=4, unroll=8, cached=True), CUDA)
    assert not legal(loop, Schedule("row", 4, 32, rows=4, unroll=4, cached=True), CUDA)
    assert not legal(loop, Schedule("row", 4, 256, splits=2), CUDA)
    assert not legal(loop, Schedule("column"), CUDA)
    assert not legal(loop, Schedule("pointwise"), CUDA)
    assert not legal(loop_kernels.bias_relu(4, 127), Schedule("pointwise", 4), CUDA)
    assert legal(loop_kernels.add_relu(127), Schedule("pointwise", 4), CUDA)


def test_a_long_row_leaves_room_for_a_second_block() -> None:
    """Rows that 1024 threads do not fill or cannot hold are held in part, if at all."""

    def picked(columns: int) -> Schedule:
        return choose(loop_kernels.softmax(S0, columns), CUDA, {"s0": 2048})

    assert picked(16384) == Schedule("row", 4, 512, unroll=8, cached=True)
    assert picked(32768) == Schedule("row", 4, 1024, unroll=8, cached=True)
    whole = Schedule("row", 8, 512, unroll=8, cached=True)
    halves = loop_kernels.softmax(S0, 32768, "bfloat16")
    assert not legal(halves, whole, CUDA), "exponentials take twice as much"
    assert picked(65536).cluster == 4 and picked(65540).cluster == 4
    without = Target.cuda(tensor_cores=False)
    parts = [
        choose(loop_kernels.softmax(S0, columns), without, {"s0": 2048})
        for columns in (65536, 65540)
    ]
    assert parts[0].beyond and not parts[1].cached
    dynamic = loop_kernels.softmax(4096, S0)
    assert not choose(dynamic, CUDA, {"s0": 1024}).cached, "nothing says that a row fits"
    assert choose(dynamic, CUDA, {"s0": 32768}).beyond
    assert not legal(dynamic, Schedule("row", 4, 256, unroll=8, beyond=2), CUDA)


def test_a_value_stored_once_a_row_does_not_narrow_vectors() -> None:
    """The mean of a row is a float beside 16-bit elements."""
    assert choose(loop_kernels.layer_norm(S0, 4096, "bfloat16"), CUDA, {"s0": 64}).lanes == 8
    column = loop_kernels.column_sum(S0, 8192)
    assert choose(column, CUDA, {"s0": 1024}).lanes == 2, "eight bytes a thread"
    assert legal(column, replace(choose(column, CUDA, {"s0": 1024}), lanes=4), CUDA)


def test_long_rows_of_narrow_elements() -> None:
    """Shared memory holds two or three of them in their own dtype."""
    shared = Schedule("row", 8, 512, unroll=8, cached=True, shared=3)
    halves = loop_kernels.layer_norm(S0, 32768, "bfloat16")
    assert choose(loop_kernels.softmax(S0, 32768, "bfloat16"), CUDA, {"s0": 64}) == shared
    assert choose(halves, CUDA, {"s0": 64}) == shared, "weight and bias come late"
    longer = choose(loop_kernels.softmax(S0, 49152, "bfloat16"), CUDA, {"s0": 64})
    assert longer == replace(shared, unroll=12, shared=2)
    assert not choose(loop_kernels.softmax(S0, 49160, "bfloat16"), CUDA, {"s0": 64}).shared
    assert legal(halves, replace(shared, shared=2), CUDA)
    for wrong in (
        replace(shared, shared=4),
        replace(shared, unroll=7),
        replace(shared, threads=1024, unroll=4),
        replace(shared, cached=False),
        replace(shared, beyond=1),
        replace(shared, lanes=1, unroll=64),
    ):
        assert not legal(halves, wrong, CUDA)


def test_rows_are_held_in_shared_memory_where_it_is_large_enough() -> None:
    """Else in registers, and so where more than one operand is held."""
    ampere, small = (
        Target.cuda(replace(H200, shared_bytes=each * 1024), tensor_cores=False)
        for each in (164, 100)
    )
    halves = loop_kernels.softmax(S0, 32768, "bfloat16")
    assert choose(halves, ampere, {"s0": 64}).shared == 2
    assert choose(halves, small, {"s0": 64}).beyond
    assert not legal(halves, choose(halves, CUDA, {"s0": 64}), ampere)
    body = [
        *(Load(name, "bfloat16", loop_kernels.row_major(name, S0, 24_576)) for name in "yg"),
        Apply("each", "float32", "mul", ("y", "g")),
        Reduce("total", "float32", "sum", "each"),
        Apply("dx", "float32", "sub", ("each", "total")),
        Store("dx", "bfloat16", loop_kernels.row_major("dx", S0, 24_576)),
    ]
    inputs = {"y": "bfloat16", "g": "bfloat16"}
    two = kernel("two", [S0], [24_576], inputs, {"dx": "bfloat16"}, body)
    alone = Schedule("row", 8, 1024, unroll=3, cached=True)
    assert choose(two, CUDA, {"s0": 64}) == alone
    assert legal(two, Schedule("row", 8, 512, unroll=6, cached=True, shared=2), CUDA)


def softmax_to(dtype: str, *more: Instruction, spread: str = "div") -> LoopKernel:
    """The quotients of a row's exponentials, rounded by a cast."""
    body = [
        Load("x", "bfloat16", loop_kernels.row_major("x", S0, 64)),
        Apply("wide", "float32", "cast", ("x",)),
        Apply("power", "float32", "exp", ("wide",)),
        Reduce("total", "float32", "sum", "power"),
        Apply("share", "float32", spread, ("power", "total")),
        Apply("y", dtype, "cast", ("share",)),
        Store("y", dtype, loop_kernels.row_major("y", S0, 64)),
        *more,
    ]
    outputs = {"y": dtype, "z": "float32"}
    return kernel("shares", [S0], [64], {"x": "bfloat16"}, outputs, body)


def test_only_values_hidden_by_16_bit_rounding_have_half_precision() -> None:
    assert half_precision_values(softmax_to("float16")) >= {"power", "total", "share"}
    assert half_precision_values(loop_kernels.softmax(S0, 64, "bfloat16")) >= {
        "power",
        "total",
        "y",
    }
    assert not half_precision_values(softmax_to("float32")) & {"power", "total", "share", "wide"}
    assert not half_precision_values(softmax_to("bfloat16", spread="sub")) & {"power", "total"}, (
        "it may cancel"
    )
    logs = [
        Apply("log", "float32", "log", ("total",)),
        Apply("z", "float32", "sub", ("wide", "log")),
        Store("z", "bfloat16", loop_kernels.row_major("z", S0, 64)),
    ]
    loop = softmax_to("bfloat16", *logs)
    only = replace(loop, body=(*loop.body[:4], *logs))
    assert half_precision_values(only) >= {"power", "z"} and "total" not in half_precision_values(
        only
    )
    wide = replace(logs[2], dtype="float32")
    assert "power" not in half_precision_values(replace(only, body=(*only.body[:-1], wide)))
    seen = Store("power", "float32", loop_kernels.row_major("z", S0, 64))
    assert half_precision_values(softmax_to("bfloat16", seen)) & {"power", "total", "share"} == {
        "total",
        "share",
    }
    most = Reduce("most", "bfloat16", "max", "y")
    again = Store("most", "bfloat16", access("z", 1, 0))
    assert not half_precision_values(softmax_to("bfloat16", most, again)) & {"power", "share"}, (
        "y is compared"
    )


class Scaled(nn.Module):
    """Backward needs the factor only to find its largest value, and computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randn(64, 8).bfloat16())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.exp(x) * x.sum(-1, keepdim=True)
        return y @ self.matrix, y.amax(0)


def test_values_that_backward_computes_again_have_full_precision() -> None:
    """With other bits than forward stored, it would not find the largest, and divide by zero."""
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    made = prepare(Scaled(), (x,), modes=("train",), device=x.device, target=CUDA)
    (forward, *_), (inference, *_) = (
        steps_of(each, "loop") for each in (made.modes[0].forward, made.modes[0].inference)
    )
    assert (forward.kernel.repeated, inference.kernel.repeated) == (True, False)
    bodies = {
        each.name: made.source.text.split(f"struct {each.name} {{")[1].split("\n};")[0]
        for each in (forward, inference)
    }
    assert "fw::approximate_exp(x)" in bodies[inference.name]
    assert "(fw::exp(x))" in bodies[forward.name] and "sum_1_rounded" in bodies[forward.name]


def test_a_store_rounds_once() -> None:
    """A cast before a store to the same type is dropped: the store rounds."""
    loop = softmax_to("bfloat16")
    text = render([(loop, choose(loop, CUDA, {"s0": 64}))], CUDA).text
    arithmetic = text.split("struct shares {")[1].split("\n};")[0]
    assert "return" in arithmetic and "rounded" not in arithmetic


def test_cached_values_replace_loaded_ones() -> None:
    """Softmax holds x, then its exponentials: float32, whatever x is."""
    for dtype, before in (("float32", 32), ("bfloat16", 16), ("float64", 64)):
        loop = loop_kernels.softmax(S0, 1024, dtype)
        plan = sweeps(loop)
        assert row_registers(loop, plan, {}, 32) == before
        assert row_registers(loop, *cache_values(loop, plan), 32) == max(before, 32)
    wide = Schedule("row", 8, 128, unroll=4, cached=True)
    half = loop_kernels.softmax(S0, 4096, "bfloat16")
    assert choose(half, CUDA, {"s0": 64}) == wide
    assert not legal(half, Schedule("row", 8, 64, unroll=8, cached=True), CUDA)
    norm = loop_kernels.layer_norm(S0, 4096)
    assert cache_values(norm, sweeps(norm))[1] == {}
    assert row_registers(norm, sweeps(norm), {}, 16) == 16, "weight and bias come late"


def test_few_waves_have_two_vectors_each() -> None:
    """With a single wave, or with many, blocks have more threads."""

    def picked(numel: int) -> tuple[int, int]:
        chosen = choose(loop_kernels.add_relu(S0), CUDA, {"s0": numel})
        return chosen.threads, chosen.unroll

    wave = CUDA.sms * 2048 * 4
    assert [picked(n) for n in (1000, wave, 5 * wave)] == [(256, 1)] * 3
    assert [picked(n) for n in (wave + 1, 4 * wave)] == [(128, 2)] * 2


def test_vectors_of_odd_rows_are_for_loads_that_follow_the_lanes() -> None:
    """Every second element of a row, as an average of neighbours reads it, is read one a thread."""

    def picked(step: int) -> Schedule:
        body = [
            Load("x", "float32", access("x", 1024, step)),
            Store("x", "float32", access("y", 255, 1)),
        ]
        loop = kernel("every", (S0, 255), (), {"x": "float32"}, {"y": "float32"}, body)
        return choose(loop, CUDA, {"s0": 65536})

    assert picked(1).flat and not picked(2).flat
