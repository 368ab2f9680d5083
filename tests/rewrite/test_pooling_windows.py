"""Pooling windows that overlap or reach beyond the image: random ones, in both languages, and which
values before them are stored."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.compile.pipeline import prepare
from fusewright.plan.steps import Plan
from fusewright.target.target import Target
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import INFERRED, on_library
from tests.support.models import Lambda
from tests.support.plans import called_operators
from tests.support.pooling import trained
from tests.support.side_by_side import SideBySide, optimized

Pool = Callable[[Tensor], Tensor]
MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
MEANS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
SHAPES = {1: (3, 4, 17), 2: (2, 3, 9, 12), 3: (2, 2, 5, 6, 7)}


def random_pool(drawn: random.Random, axes: int, dilates: float = 0.5) -> tuple[str, Pool]:
    """A random pool that PyTorch accepts, and its description. Maxima may be dilated."""
    taps = [drawn.randint(1, 4 if axes < 3 else 3) for _ in range(axes)]
    given = {
        "stride": [drawn.randint(1, 4) for _ in range(axes)],
        "padding": [drawn.randint(0, k // 2) for k in taps],
        "ceil_mode": drawn.random() < 0.5,
    }
    if drawn.random() < dilates:
        given["dilation"] = [drawn.randint(1, 2) for _ in range(axes)]
        of = MAXIMA[axes]
    else:
        given["count_include_pad"] = drawn.random() < 0.5
        if axes > 1 and drawn.random() < 0.2:
            given["divisor_override"] = drawn.randint(1, 9)
        of = MEANS[axes]
    kernel = taps if axes > 1 else taps[0]
    numbers = {k: v[0] if axes == 1 and isinstance(v, list) else v for k, v in given.items()}
    return f"{of.__name__} {kernel} {numbers}", lambda x: of(x, kernel, **numbers)


def inference(model: nn.Module, x: Tensor, target: Target) -> Plan:
    return prepare(model, (x,), modes=("eval",), device=x.device, target=target).modes[-1].inference


def built(model: nn.Module, language: str, *inputs: Tensor) -> tuple[nn.Module, Plan]:
    """The model on kernels of this language, and what was planned for them."""
    if language == "host":
        fast, mode = optimized(model, *inputs, mode="eval")
        return fast, mode.inference
    device, target = inputs[0].device, Target.cuda(tensor_cores=False)
    found = prepare(model, inputs, modes=("eval",), device=device, target=target)
    fast = on_library(model, inputs, found, emulated(found.source), INFERRED).eval()
    return fast, found.modes[0].inference


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_random_windows(axes: int, seed: int) -> None:
    drawn = random.Random(100 * axes + seed)
    words, pools = zip(*(random_pool(drawn, axes) for _ in range(5)), strict=True)
    model = Lambda(lambda x: tuple(pool(x) for pool in pools))
    x = torch.randn(SHAPES[axes], dtype=drawn.choice([torch.float32, torch.float64]))
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(axes)
    if last is not None and seed % 2:
        x = x.contiguous(memory_format=last)
    fast, plan = built(model, ("host", "cuda")[seed % 3 == 0], x)
    assert not called_operators(plan)
    poisoned = x.clone()
    poisoned.flatten()[::7], poisoned.flatten()[3::11] = math.nan, -math.inf
    for given in (x, poisoned, torch.cat((x, x * 3))):
        with torch.no_grad():
            for word, ours, eager in zip(words, fast(given), model(given), strict=True):
                torch.testing.assert_close(
                    ours, eager, rtol=2e-6, atol=2e-7, equal_nan=True, msg=lambda m, w=word: w + m
                )
                assert ours.stride() == eager.stride(), word


@pytest.mark.sample(2)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_random_gradients_of_means(axes: int) -> None:
    drawn = random.Random(axes)
    words, pools = zip(*(random_pool(drawn, axes, dilates=0) for _ in range(6)), strict=True)
    model, inputs = SideBySide(pools), [torch.randn(SHAPES[axes]) for _ in pools]
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(axes)
    if last is not None:
        inputs[::2] = [x.contiguous(memory_format=last) for x in inputs[::2]]
    target = Target.cuda(tensor_cores=False)
    found = prepare(model, inputs, modes=("train",), device=inputs[0].device, target=target)
    assert not called_operators(found.modes[0].forward, found.modes[0].backward), words
    emulates = on_library(model, inputs, found, emulated(found.source))
    for fast in (emulates, optimized(model, *inputs)[0]):
        for given in (inputs, [torch.cat((x, x * 3)) for x in inputs], [x[:1] for x in inputs]):
            pairs = zip(words, trained(fast, *given), trained(model, *given), strict=True)
            for word, mine, theirs in pairs:
                torch.testing.assert_close(
                    mine, theirs, rtol=3e-6, atol=3e-7, msg=lambda m, w=word: w + m
                )


@pytest.mark.parametrize("language", ["host", "cuda"])
def test_windows_in_16_bits(language: str) -> None:
    def pools(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)

    model = Lambda(lambda *inputs: tuple(pooled for x in inputs for pooled in pools(x)))
    inputs = [
        torch.randn(2, 16, 9, 12).to(dtype).contiguous(memory_format=layout)
        for dtype in (torch.float16, torch.bfloat16)
        for layout in (torch.contiguous_format, torch.channels_last)
    ]
    fast, plan = built(model, language, *inputs)
    assert not called_operators(plan)
    with torch.no_grad():
        for ours, eager in zip(fast(*inputs), model(*inputs), strict=True):
            assert ours.dtype == eager.dtype and torch.equal(ours, eager)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("before", "stride", "loops"),
    [
        (torch.relu, 1, 1),
        (torch.relu, 2, 1),
        (torch.sigmoid, 2, 1),
        (torch.sigmoid, 1, 2),
        (lambda x: torch.erf(x) * torch.exp(x) * torch.sin(x), 2, 2),
        (lambda x: F.avg_pool2d(x, 3, 1, 1), 1, 2),
        (lambda x: F.max_pool2d(torch.relu(x), 2), 1, 1),
    ],
)
def test_costly_values_before_a_pool_are_computed_once(
    before: Pool, stride: int, loops: int
) -> None:
    """They are stored as they are, not padded."""
    model = Lambda(lambda x: F.max_pool2d(before(x), 3, stride, 1))
    x = torch.randn(2, 3, 16, 20)
    plan = inference(model, x, Target.cuda())
    assert not called_operators(plan) and sum(step.kind == "loop" for step in plan.steps) == loops
    sizes = [spec.shape[-1].factor for name, spec in plan.specs if name not in plan.outputs]
    assert 22 not in sizes
    with torch.no_grad():
        fast, _ = optimized(model, x, mode="eval")
        torch.testing.assert_close(fast(x), model(x), rtol=2e-6, atol=2e-7)


def test_a_pyramid_of_pools_is_one_loop_each() -> None:
    def pyramid(x: Tensor) -> tuple[Tensor, ...]:
        found = [torch.relu(x)]
        for _ in range(3):
            found.append(F.max_pool2d(found[-1], 5, 1, 2))
        return tuple(found)

    model, x = Lambda(pyramid), torch.randn(2, 3, 9, 8)
    plan = inference(model, x, Target.cuda())
    assert not called_operators(plan) and len(plan.steps) <= 4
    fast, _ = optimized(model, x, mode="eval")
    with torch.no_grad():
        for ours, eager in zip(fast(x), model(x), strict=True):
            assert torch.equal(ours, eager)


def test_the_first_layers_of_a_network() -> None:
    """Batch norm and relu become part of the pool; the convolution stays PyTorch's."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    fast, mode = optimized(model, x, mode="eval")
    assert called_operators(mode.inference) == ["aten.convolution.default"]
    with torch.no_grad():
        ours, eager = fast(x), model(x)
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def test_bytes_are_counted_once() -> None:
    """The nine taps of a window read the image once."""
    model, x = Lambda(lambda x: F.max_pool2d(x, 3, 2, 1)), torch.randn(2, 3, 16, 20)
    (step,) = inference(model, x, Target.cuda()).steps
    assert step.kind == "loop" and step.bytes_moved == 4 * (x.numel() + x.numel() // 4)
