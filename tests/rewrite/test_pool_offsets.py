"""Max pooling in training: offsets saved as bytes and gathered gradients, with PyTorch's bits:
the first of equal values, the last NaN, windows of -Inf."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.compile.pipeline import prepare
from fusewright.ir.interpret import interpret
from fusewright.ir.loop import Store
from fusewright.ir.pool_offsets import NOWHERE, Along, pitches
from fusewright.plan.steps import Plan
from fusewright.rewrite import rewrite
from fusewright.schedule.coalesce import coalesce, with_long_lanes
from fusewright.target.target import Target
from tests.support.cuda_on_host import emulated
from tests.support.emitted_files import emitted
from tests.support.emulated_modules import TRAINED, on_library
from tests.support.models import Lambda
from tests.support.pooling import (
    as_exact,
    calls_in_training,
    grad_output_of,
    hard_inputs,
    same,
    same_bits,
    trained,
    training_plans,
)
from tests.support.side_by_side import SideBySide, optimized

Pool = Callable[[Tensor], Tensor]
IMAGES, ODD = (2, 3, 12, 10), (2, 3, 13, 17)
POOLS: dict[str, tuple[Pool, tuple[int, ...]]] = {
    "2 by 2": (lambda x: F.max_pool2d(x, 2), IMAGES),
    "2 by 2, odd": (lambda x: F.max_pool2d(x, 2), ODD),
    "a network's first": (lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES),
    "a network's first, odd": (lambda x: F.max_pool2d(x, 3, 2, 1), ODD),
    "stride 1": (lambda x: F.max_pool2d(x, 3, 1, 1), IMAGES),
    "oblong": (lambda x: F.max_pool2d(x, (2, 3), (2, 1)), IMAGES),
    "5 by 3": (lambda x: F.max_pool2d(x, 5, 3), ODD),
    "far apart": (lambda x: F.max_pool2d(x, 2, 3, 1), ODD),
    "of one": (lambda x: F.max_pool2d(x, 1, 2), IMAGES),
    "dilated": (lambda x: F.max_pool2d(x, 2, 1, dilation=(2, 3)), ODD),
    "rounded up": (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), IMAGES),
    "rounded up, padded": (lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), ODD),
    "one image": (lambda x: F.max_pool2d(x, 3, 2, 1), (4, 12, 10)),
    "line": (lambda x: F.max_pool1d(x, 3, 2, 1), (3, 4, 17)),
    "dilated line": (lambda x: F.max_pool1d(x, 8, 1, 4, 3), (3, 4, 37)),
    "dilated, padded": (lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2), IMAGES),
    "dilated, padded, far apart": (lambda x: F.max_pool2d(x, (4, 3), 3, 1, (3, 2)), (2, 3, 19, 22)),
    "dilated, padded, even": (lambda x: F.max_pool2d(x, 4, 2, 2, (2, 3)), (2, 3, 19, 22)),
    "volume": (lambda x: F.max_pool3d(x, 2), (2, 3, 4, 6, 8)),
    "overlapping volume": (lambda x: F.max_pool3d(x, 3, 2, 1), (2, 2, 5, 6, 7)),
}


def loops(plan: Plan | None) -> int:
    assert plan is not None
    return sum(step.kind == "loop" for step in plan.steps)


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", sorted({shape for _, shape in POOLS.values()}))
def test_results_and_gradients_have_eagers_bits(shape: tuple[int, ...]) -> None:
    pools = {name: pool for name, (pool, of) in POOLS.items() if of == shape}
    model, inputs = SideBySide(pools.values()), [torch.randn(shape) for _ in pools]
    fast, mode = optimized(model, *inputs)
    # One loop for each pool at most: small ones over equal axes share a launch.
    assert not calls_in_training(mode) and loops(mode.forward) <= len(pools)
    grown, first = [torch.cat((x, x * 2, x)) for x in inputs], [x[:1] for x in inputs]
    for given in (inputs, grown, first, *zip(*map(hard_inputs, inputs), strict=True)):
        same(fast, model, *given, words=tuple(pools))
    if "one image" not in pools:  # which PyTorch refuses without channels
        same(fast, model, *(x[:0] for x in inputs), words=tuple(pools))


@pytest.mark.sample(2)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_layouts(dtype: torch.dtype, last: bool) -> None:
    cases = ((IMAGES, (2,)), (IMAGES, (3, 2, 1)), (ODD, (3, 2, 1)))
    model = SideBySide(lambda x, s=size: F.max_pool2d(torch.relu(x), *s) for _, size in cases)
    order = torch.channels_last if last else torch.contiguous_format
    inputs = [torch.randn(shape).to(dtype).contiguous(memory_format=order) for shape, _ in cases]
    fast, mode = optimized(model, *inputs)
    assert not calls_in_training(mode)
    for given in (inputs, *zip(*(hard_inputs(x)[:2] for x in inputs), strict=True)):
        mine, theirs = trained(fast, *given), trained(model, *given)
        exact = trained(model, *(x.double() for x in given), dtype=dtype)
        same_bits(mine[0], theirs[0])
        for at in (1, 2):
            as_exact(mine[at], theirs[at], exact[at][1])


def random_pool(drawn: random.Random) -> tuple[str, Pool, tuple[int, ...]]:
    """A pool that is ours."""
    while True:
        window, *found = random_pool_of_any_kind(drawn)
        if pitches(window) is not None:
            return found[0], found[1], found[2]


def random_pool_of_any_kind(
    drawn: random.Random,
) -> tuple[tuple[Along, ...], str, Pool, tuple[int, ...]]:
    axes = drawn.randint(1, 3)
    taps = [drawn.randint(1, 4 if axes < 3 else 3) for _ in range(axes)]
    given: dict[str, Any] = {
        "stride": [drawn.randint(1, 4) for _ in range(axes)],
        "padding": [drawn.randint(0, k // 2) for k in taps],
        "dilation": [drawn.choice((1, 1, 2, 3)) for _ in range(axes)],
        "ceil_mode": drawn.random() < 0.4,
    }
    least = [max(4, (k - 1) * d + 1) for k, d in zip(taps, given["dilation"], strict=True)]
    shape = (drawn.randint(1, 3), 2, *(each + drawn.randint(0, 7) for each in least))
    of = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[axes]
    columns = (given[each] for each in ("stride", "padding", "dilation"))
    window = tuple(Along(*each) for each in zip(taps, *columns, strict=True))
    if axes == 1:
        given = {
            key: value[0] if isinstance(value, list) else value for key, value in given.items()
        }
    words = f"{of.__name__} of {shape}: {taps} {given}"
    return window, words, lambda x: of(x, taps if axes > 1 else taps[0], **given), shape


@pytest.mark.sample(2)
@pytest.mark.parametrize("seeds", [range(10), range(10, 20)], ids=str)
def test_random_windows(seeds: range) -> None:
    words, pools, inputs = [], [], []
    for seed in seeds:
        drawn = random.Random(seed)
        word, pool, shape = random_pool(drawn)
        before = drawn.choice([torch.relu, torch.neg, lambda x: x])
        words.append(word)
        pools.append(lambda x, pool=pool, before=before: pool(before(x)))
        inputs.append(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    model = SideBySide(pools)
    fast, mode = optimized(model, *inputs)
    assert not calls_in_training(mode), words
    for given in (inputs, *zip(*map(hard_inputs, inputs), strict=True)):
        same(fast, model, *given, words=words)


@pytest.mark.parametrize("last", [False, True])
def test_on_emulated_cuda(last: bool) -> None:
    sizes = {(2,): (12, 10), (3, 2, 1): (13, 9), (3, 1, 1): (12, 10), (3, 1, 1, 2): (12, 10)}
    model = SideBySide(lambda x, s=size: F.max_pool2d(torch.relu(x) * 2, *s) for size in sizes)
    order = torch.channels_last if last else torch.contiguous_format
    inputs = [torch.randn(2, 8, *area).contiguous(memory_format=order) for area in sizes.values()]
    target = Target.cuda(tensor_cores=False)
    found = prepare(model, inputs, modes=("train",), device=torch.device("cpu"), target=target)
    fast = on_library(model, inputs, found, emulated(found.source), TRAINED)
    for given in (inputs, *zip(*map(hard_inputs, inputs), strict=True)):
        same(fast, model, *given, words=[f"{size}" for size in sizes])


class Shifted(nn.Module):
    """The gradient of the shift is summed where the pool's is gathered."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.shift, self.size = nn.Parameter(torch.randn(8, 1, 1)), size

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(torch.relu(x + self.shift), *self.size)


@pytest.mark.parametrize("size", [(2,), (3, 2, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_summed_as_they_are_gathered(size: tuple[int, ...], last: bool) -> None:
    model, x = Shifted(*size), torch.randn(3, 8, 12, 10)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    target = Target.cuda(tensor_cores=False)
    found = prepare(model, (x,), modes=("train",), device=x.device, target=target)
    (mode,) = found.modes
    assert mode.backward is not None and len(mode.backward.kernels) == 1
    compared = mode.forward.kernels[0].operators.count("isnan")
    assert compared == size[0] ** 2 - 1
    fast = on_library(model, x, found, emulated(found.source), TRAINED)
    same(fast, model, x)
    assert fast.shift.grad is not None and model.shift.grad is not None
    torch.testing.assert_close(fast.shift.grad, model.shift.grad, rtol=1e-5, atol=1e-5)


def test_the_interpreter_runs_both_operators() -> None:
    """Captured and lowered graphs agree, with ReLU's mask among the offsets and without."""
    for before in (torch.relu, torch.neg):
        for size in ((2,), (3, 2, 1)):
            model = Lambda(lambda x, b=before, s=size: F.max_pool2d(b(x), *s))
            x = torch.randint(-3, 4, ODD).double().requires_grad_()
            program = capture(model, (x,), mode="train")
            assert "fusewright.max_pool_offsets.default" in [n.op for n in program.forward.nodes]
            y = model(x)
            grad_output = grad_output_of(y)
            (expected,) = torch.autograd.grad(y, x, grad_output)
            for each in (program, rewrite(program)):
                assert each.backward is not None
                given, *saved = interpret(each.forward, [x.detach()], each.example_sizes)
                assert torch.equal(given, y)
                found = interpret(each.backward, [*saved, grad_output], each.example_sizes)
                assert torch.equal(found[0], expected)


def test_a_network_saves_offsets_as_bytes() -> None:
    """Backward reads offsets, which include ReLU's mask, and the gradient. The image before the
    pool is not saved, and the bias gradient is summed in the same loop."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3)
    )
    x = torch.randn(4, 3, 32, 32)
    mode = training_plans(model, x, Target.cuda(tensor_cores=False))
    backward = mode.program.backward
    assert backward is not None and mode.backward is not None
    saved = [(each.spec.dtype, each.spec.shape[-1].factor) for each in backward.inputs]
    assert ("uint8", 16) in saved and not [each for each in saved[3:] if each[1] == 32]
    (step,) = [s for s in mode.backward.steps if s.kind == "loop" and "eq" in s.kernel.summary]
    assert step.kernel.summary == "add → eq → where → sum"
    read = [each.dtype for each in step.kernel.arguments if not each.is_output]
    assert sorted(read) == ["float32", "uint8"]
    fast, _ = optimized(model, x)
    grown = torch.randn(7, 3, 32, 32)
    for given in (x, grown):
        for mine, theirs in zip(*trained(fast, given), *trained(model, given), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-4)


def test_offsets_have_the_layout_of_the_convolutions() -> None:
    """Between channels-last convolutions nothing is transposed, not even bytes."""
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3)
    )
    mode = training_plans(model, torch.randn(32, 64, 64, 64), Target.cuda(tensor_cores=False))
    assert mode.backward is not None
    for plan in (mode.forward, mode.backward):
        (kernel,) = [
            step.kernel
            for step in plan.steps
            if step.kind == "loop" and "uint8" in [a.dtype for a in step.kernel.arguments]
        ]
        channels = [at for at, axis in enumerate(kernel.axes) if axis.size.factor == 64]
        accesses = [getattr(item, "access", None) for item in kernel.body]
        strides = {each.strides[channels[0]].factor for each in accesses if each is not None}
        # 0: the flag that says whether operands are rounded.
        assert len(channels) == 1 and strides - {0} == {1}


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: torch.stack([y.float() for y in F.max_pool2d(x, 2, return_indices=True)]),
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        lambda x: F.max_pool2d(x, (7, 6)),
        lambda x: F.max_pool3d(x[:, None], 3, 2, 1, dilation=(1, 3, 3)),
        lambda x: F.adaptive_max_pool2d(x, 5),
    ],
)
def test_which_pools_stay_pytorchs(pool: Pool) -> None:
    model, x = Lambda(lambda x: pool(x)), torch.randn(IMAGES)
    fast, mode = optimized(model, x)
    found = [op for op in calls_in_training(mode) if "max_pool" in op]
    assert len(found) == 2 and not [op for op in found if op.startswith("fusewright")]
    same(fast, model, x)


def test_an_empty_batch() -> None:
    model, x = Lambda(lambda x: F.max_pool2d(x, 2)), torch.randn(0, 3, 8, 8)
    same(optimized(model, x)[0], model, x)


def test_without_a_gradient_no_offsets_are_saved() -> None:
    model, x = Lambda(lambda x: F.max_pool2d(x, 3, 2, 1)), torch.randn(IMAGES)
    (step,) = training_plans(model, x).inference.steps
    assert step.kind == "loop" and set(step.kernel.summary.split(" → ")) == {"maximum"}


def test_runs_on_the_host_are_long() -> None:
    """Not as short as a stride: two adjacent elements are in two runs."""
    model, x = Lambda(lambda x: F.max_pool2d(x, 2)), torch.randn(2, 3, 12, 40)
    fast, mode = optimized(model, x)
    assert mode.backward is not None
    (step,) = mode.backward.kernels
    assert step.kind == "loop"
    small = coalesce(step.kernel)
    runs = with_long_lanes(small)
    assert [str(axis.size) for axis in small.outer[-2:]] == ["20", "2"]
    assert [str(axis.size) for axis in runs.outer[-2:]] == ["2", "20"]
    (store,) = (item for item in runs.body if isinstance(item, Store))
    assert [each.factor for each in store.access.strides[-2:]] == [1, 2]
    same(fast, model, x)


PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        return self.pool(torch.relu(self.conv(x)))


def get_inputs():
    return [torch.randn(2, 2, 15, 18)]


def get_init_inputs():
    return []
"""


def test_an_emitted_file_calls_no_custom_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs would not have it."""
    text, names, _ = emitted(PROBLEM, tmp_path, monkeypatch)
    assert "max_pool_offsets" not in text
    eager, fast = names["Model"](), names["ModelNew"]()
    fast.load_state_dict(eager.state_dict())
    for rows in (2, 5):
        x = torch.randn(rows, 2, 15, 18)
        for mine, theirs in zip(*trained(fast, x), *trained(eager, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(50))
def test_an_offset_identifies_one_tap(seed: int) -> None:
    """Among all offsets that elements may have, only a tap's own gives its code."""
    drawn = random.Random(seed)
    window = tuple(
        Along(drawn.randint(1, 4), drawn.randint(1, 5), drawn.randint(0, 1), drawn.randint(1, 3))
        for _ in range(drawn.randint(1, 3))
    )
    numbers = pitches(window)
    if numbers is None:
        return
    asked = [((), 0)]
    taps = [((), 0)]
    for along, pitch in zip(window, numbers, strict=True):
        asked = [((*at, o), n + o * pitch) for at, n in asked for o in along.offsets]
        inside = range(0, along.last + 1, along.dilation)
        taps = [((*at, o), n + o * pitch) for at, n in taps for o in inside]
    of = {number: at for at, number in taps}
    assert len(of) == len(taps) and max(number for _, number in asked) < NOWHERE
    assert all(of.get(number, at) == at for at, number in asked)
