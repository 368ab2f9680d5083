"""Padding with a constant: it becomes part of the loops around it and reads nothing outside."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.compile.pipeline import prepare
from fusewright.ir.interpret import interpret
from fusewright.plan.steps import Call
from fusewright.rewrite import rewrite
from fusewright.target.target import Target
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import INFERRED, on_library
from tests.support.models import Lambda
from tests.support.side_by_side import SideBySide, optimized

IMAGES = (3, 4, 9, 12)
WAYS = {
    "on all sides": lambda x: F.pad(x, (1, 2, 3, 1)),
    "after alone": lambda x: F.pad(x, (0, 2)),
    "cut off": lambda x: F.pad(x, (-1, -2, -3, 0)),
    "cut off and added": lambda x: F.pad(x, (-2, 5, 4, -1), value=0.1),
    "moved": lambda x: F.pad(x, (1, -1, -2, 2), value=-math.inf),
    "channels": lambda x: F.pad(x, (0, 0, 0, 0, 2, 1), value=7.0),
    "all but nothing": lambda x: F.pad(x, (20, -11)),
    "nothing left": lambda x: F.pad(x, (-6, -6)),
    "nothing": lambda x: F.pad(x, (0, 0)),
    "twice": lambda x: F.pad(F.pad(x, (1, 1), value=2.0) * 3, (2, 0, 0, 1), value=5.0),
    "a part": lambda x: F.pad(x[:, :, 1:8:2, 3:9], (2, 2, 1, 1)),
    "and then a part": lambda x: F.pad(x, (2, 3, 1, 1), value=4.0)[:, :, 1::2, ::3],
    "after a product": lambda x: F.pad(x * torch.tanh(x), (1, 1, 1, 1), value=2.0),
    "transposed": lambda x: F.pad(x.transpose(1, 3), (1, 2, 0, 3)),
    "viewed": lambda x: F.pad(x.flatten(2), (3, 4)).view(3, 4, 5, 23),
    "flattened afterwards": lambda x: F.pad(x, (2, 2, 1, 0)).flatten(1),
    "broadcast": lambda x: x + F.pad(x[:, :, :, :1], (11, 0)),
    "of one": lambda x: F.pad(x[:, :, :1, :1], (1, 1, 0, 3)),
    "summed": lambda x: F.pad(x, (1, 3, 2, 0), value=1.0).sum((2, 3)),
    "summed by columns": lambda x: F.pad(x, (1, 3, 2, 0), value=1.0).sum((0, 1)),
    "softmax": lambda x: F.pad(x, (1, 3, 2, 0), value=-1.0).softmax(-1),
    "with what it was": lambda x: F.pad(x, (1, 0)).sum(-1) + x.sum(-1),
    "differences": lambda x: F.pad(x, (0, 1)) - F.pad(x, (1, 0)),
    "of a constant": lambda x: x + F.pad(torch.ones(9, 10), (1, 1), value=3.0),
    "of indices": lambda x: x * F.pad(torch.arange(10), (1, 1), value=-4),
}


TOGETHER = 8
# One way fixes the batch's size, for itself and for those compiled with it.
OPEN = [name for name in WAYS if name != "viewed"]
GROUPS = [["viewed"], *(OPEN[at : at + TOGETHER] for at in range(0, len(OPEN), TOGETHER))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("language", ["host", "cuda"])
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_padding_is_part_of_loops(names: list[str], language: str) -> None:
    model = SideBySide(lambda x, n=name: WAYS[n](torch.sigmoid(x)) + 0.5 for name in names)
    inputs = [torch.randn(IMAGES) for _ in names]
    for x in inputs:
        x[0, 1, 2, 3] = math.nan
    check(model, *inputs, language=language)


def check(model: nn.Module, *inputs: Tensor, language: str = "host") -> nn.Module:
    """Compare with eager: no calls, equal values and strides. Returns the optimized module."""
    if language == "host":
        fast, mode = optimized(model, *inputs, mode="eval")
    else:
        target = Target.cuda(tensor_cores=False)
        device = inputs[0].device
        found = prepare(model, inputs, modes=("eval",), device=device, target=target)
        fast = on_library(model, inputs, found, emulated(found.source), INFERRED)
        mode = found.modes[0]
    steps = mode.inference.steps
    assert not [step.node.op for step in steps if isinstance(step, Call)]
    assert sum(step.kind == "loop" for step in steps) >= len(inputs)
    fast.eval()
    with torch.no_grad():
        made, expected = fast(*inputs), model(*inputs)
    if isinstance(made, Tensor):
        made, expected = (made,), (expected,)
    for ours, eager in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-6, atol=2e-7, equal_nan=True)
        assert ours.stride() == eager.stride()
    return fast


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_other_types(dtype: str) -> None:
    x = (torch.randn(3, 5, 7) * 9).to(getattr(torch, dtype))
    model = Lambda(lambda x: F.pad(x, (1, 2, 3, -1), value=3))
    fast = check(model, x)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("way", ["on all sides", "cut off and added"])
def test_channels_last(way: str) -> None:
    x = torch.randn(IMAGES).contiguous(memory_format=torch.channels_last)
    check(Lambda(lambda x: WAYS[way](x) * 2), x)


@pytest.mark.parametrize("way", ["on all sides", "cut off", "moved", "twice", "differences"])
def test_gradients(way: str) -> None:
    model = Lambda(lambda x: torch.tanh(WAYS[way](torch.sigmoid(x)).clamp(-9, 9)))
    x = torch.randn(IMAGES)
    fast, mode = optimized(model, x)
    assert mode.backward is not None
    assert not [step for step in mode.backward.steps if isinstance(step, Call)]
    results = []
    for each in (fast, model):
        given = x.clone().requires_grad_()
        made = each(given)
        results.append((made, *torch.autograd.grad(made, given, torch.cos(made.detach() * 3))))
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("sizes", [(0, 4, 5), (2, 4, 0), (1, 1, 1)])
def test_small_sizes(sizes: tuple[int, ...]) -> None:
    x = torch.randn(sizes)
    check(Lambda(lambda x: F.pad(x, (1, 2, 0, 1), value=6.0) * 2), x)


def test_the_batch_stays_dynamic() -> None:
    model, x = Lambda(lambda x: F.pad(x.exp(), (1, 2, 0, 1))), torch.randn(4, 5, 6)
    fast = fusewright.optimize(model, x, modes=("eval",))
    with torch.no_grad():
        for batch in (1, 4, 9, 0):
            given = torch.randn(batch, 5, 6)
            torch.testing.assert_close(fast(given), model(given))


def test_the_interpreter_pads() -> None:
    model, x = Lambda(lambda x: F.pad(x, (-1, 2, 3, 0), value=2.5)), torch.randn(2, 3, 4)
    graph = rewrite(capture(model, (x,), mode="eval")).forward
    assert "pad" in [node.op for node in graph.nodes]
    (found,) = interpret(graph, [x], {"s0": 2}, exact=True)
    assert torch.equal(found, model(x))
