"""Pooling and largest values: what goes into a loop, what stays PyTorch's, and the numbers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.pipeline import prepare
from fusewright.plan.steps import Call, Loop, Plan
from fusewright.schedule import Target
from tests.test_plan import Lambda

IMAGES, VOLUMES, LINES = (3, 4, 9, 12), (2, 3, 4, 7, 8), (3, 5, 17)

OURS = {
    "max": (lambda x: F.max_pool2d(x, 2), IMAGES),
    "max, oblong": (lambda x: F.max_pool2d(x, (1, 3), (2, 3)), IMAGES),
    "max, far apart": (lambda x: F.max_pool2d(x, 2, 3), IMAGES),
    "max of one": (lambda x: F.max_pool2d(x, 1, 2), IMAGES),
    "max of a volume": (lambda x: F.max_pool3d(x, (2, 3, 2)), VOLUMES),
    "max of a line": (lambda x: F.max_pool1d(x, 4), LINES),
    "max, one image": (lambda x: F.max_pool2d(x[0], 2), IMAGES),
    "mean": (lambda x: F.avg_pool2d(x, 3), IMAGES),
    "mean, far apart": (lambda x: F.avg_pool2d(x, 2, 4), IMAGES),
    "mean of a volume": (lambda x: F.avg_pool3d(x, 2), VOLUMES),
    "mean of a line": (lambda x: F.avg_pool1d(x, 3), LINES),
    "rounded up, nothing beyond": (lambda x: F.max_pool2d(x, 3, ceil_mode=True), IMAGES),
    "overlapping": (lambda x: F.max_pool2d(x, 3, 2), IMAGES),
    "padded": (lambda x: F.max_pool2d(x, 2, padding=1), IMAGES),
    "a network's first": (lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES),
    "dilated": (lambda x: F.max_pool2d(x, 2, dilation=2), IMAGES),
    "dilated line": (lambda x: F.max_pool1d(x, 5, 2, padding=2, dilation=2), LINES),
    "nothing but padding": (lambda x: F.max_pool1d(x[..., :1], 2, 1, padding=1, dilation=2), LINES),
    "overlapping volume": (lambda x: F.max_pool3d(x, 3, 2, 1), VOLUMES),
    "rounded up": (lambda x: F.max_pool2d(x, 2, 3, padding=1, ceil_mode=True), IMAGES),
    "mean, overlapping": (lambda x: F.avg_pool2d(x, 3, 1, 1), IMAGES),
    "mean of the image alone": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        IMAGES,
    ),
    "mean, rounded up": (lambda x: F.avg_pool2d(x, 2, ceil_mode=True), IMAGES),
    "mean, rounded up and padded": (lambda x: F.avg_pool2d(x, 4, 3, 1, ceil_mode=True), IMAGES),
    "mean of nothing": (
        lambda x: F.avg_pool1d(x[..., :4], 2, 3, 1, ceil_mode=True, count_include_pad=False),
        LINES,
    ),
    "mean of a volume's border": (
        lambda x: F.avg_pool3d(x, 2, 2, (1, 0, 1), count_include_pad=False),
        VOLUMES,
    ),
    "mean of a line's border": (lambda x: F.avg_pool1d(x, 4, 1, 2), LINES),
    "another divisor": (lambda x: F.avg_pool2d(x, 3, 1, divisor_override=4), IMAGES),
    "largest along an axis": (lambda x: x.max(1)[0], IMAGES),
    "smallest, kept": (lambda x: x.min(-1, keepdim=True).values, IMAGES),
}
PYTORCHS = {
    "places": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], IMAGES),
    "many taps": (lambda x: F.avg_pool2d(x, (9, 6)), IMAGES),
    "places along an axis": (lambda x: x.max(1)[1], IMAGES),
}


def inference(model: nn.Module, x: Tensor) -> Plan:
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=Target.host())
    return found.modes[-1].inference


def calls(plan: Plan) -> list[str]:
    return [step.node.op for step in plan.steps if isinstance(step, Call)]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("last", [False, True])
def test_what_is_ours(name: str, last: bool) -> None:
    pool, shape = OURS[name]
    model = Lambda(lambda m, x: pool(x * 0.5 - 1) * 2 + 1)
    x = torch.randn(shape)
    if last:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        x = x.contiguous(memory_format=formats.get(x.dim(), torch.contiguous_format))
    plan = inference(model, x)
    assert not calls(plan) and sum(isinstance(step, Loop) for step in plan.steps) == 1
    fast = fusewright.optimize(copy.deepcopy(model), x, modes=("eval",))
    for given in (x, torch.randn_like(x)[:1].repeat(5, *(1,) * (x.dim() - 1)), x * math.inf):
        with torch.no_grad():
            ours, eager = fast(given), model(given)
        assert ours.shape == eager.shape
        torch.testing.assert_close(ours, eager, rtol=2e-6, atol=2e-7, equal_nan=True)
    with torch.no_grad():
        assert fast(x).stride() == model(x).stride()


@pytest.mark.parametrize("name", PYTORCHS)
def test_what_stays_pytorchs(name: str) -> None:
    pool, shape = PYTORCHS[name]
    model, x = Lambda(lambda m, x: pool(x)), torch.randn(shape)
    assert calls(inference(model, x))
    fast = fusewright.optimize(model, x, modes=("eval",))
    with torch.no_grad():
        assert torch.equal(fast(x), pool(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_other_types(pool, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    model, x = Lambda(lambda m, x: pool(x, 2)), torch.randn(IMAGES).to(dtype)
    with torch.no_grad():
        assert torch.equal(fusewright.optimize(model, x, modes=("eval",))(x), pool(x, 2))


def test_nan_is_the_largest_and_the_smallest() -> None:
    x = torch.randn(2, 3, 4, 6)
    x[0, 1, 2, 3], x[1, 2, 0, 0], x[1, 0, 3, 5] = math.nan, math.inf, -math.inf
    for pool in (lambda x: F.max_pool2d(x, 2), lambda x: x.min(1)[0], lambda x: x.max(3)[0]):
        fast = fusewright.optimize(Lambda(lambda m, x, p=pool: p(x)), x, modes=("eval",))
        with torch.no_grad():
            torch.testing.assert_close(fast(x), pool(x), rtol=0, atol=0, equal_nan=True)


def test_whole_numbers_have_a_largest() -> None:
    x = torch.randint(-9, 9, (5, 7, 3))
    fast = fusewright.optimize(Lambda(lambda m, x: x.max(1)[0] - x.min(1)[0]), x, modes=("eval",))
    assert torch.equal(fast(x), x.max(1)[0] - x.min(1)[0])


@pytest.mark.parametrize(
    ("pool", "shape", "whose"),
    [
        (lambda x: F.avg_pool2d(x, (3, 2)), (2, 3, 9, 12), "ours"),
        (lambda x: F.avg_pool3d(x, 2), (2, 3, 4, 6, 8), "ours"),
        (lambda x: F.avg_pool1d(x, 4), (2, 3, 16), "ours"),
        (lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 3, 9, 12), "ours"),
        (lambda x: F.avg_pool2d(x, (2, 3), 1, (1, 0)), (2, 3, 9, 12), "ours"),
        (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), (2, 3, 9, 12), "ours"),
        (lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3), (2, 3, 9, 12), "ours"),
        (lambda x: F.avg_pool3d(x, 2, 1, 1), (2, 3, 4, 6, 8), "ours"),
        (lambda x: F.avg_pool1d(x, 5, 1, 2), (2, 3, 16), "ours"),
        (lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 3, 9, 12), "PyTorch's"),
        (lambda x: F.avg_pool2d(x, 2), (2, 3, 9, 12), "PyTorch's"),
        (lambda x: F.max_pool2d(x, 2), (2, 3, 9, 12), "ours"),
        (lambda x: F.max_pool2d(x, 7), (2, 3, 9, 12), "PyTorch's"),
        (lambda x: x.max(2)[0], (2, 3, 9, 12), "PyTorch's"),
    ],
)
def test_gradients(pool, shape: tuple[int, ...], whose: str) -> None:  # type: ignore[no-untyped-def]
    """The last window of nine rows leaves one over, which has no share."""
    model = Lambda(lambda m, x: torch.tanh(pool(torch.sigmoid(x))))
    x = torch.randn(shape)
    mode = prepare(model, (x,), modes=("train",), device=x.device, target=Target.host()).modes[-1]
    assert mode.backward is not None
    assert bool(calls(mode.backward)) == (whose == "PyTorch's")
    fast = fusewright.optimize(copy.deepcopy(model), x, modes=("train",))
    found = []
    for each in (fast, model):
        given = x.clone().requires_grad_()
        made = each(given)
        found.append((made, *torch.autograd.grad(made, given, torch.cos(made.detach() * 3))))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("largest", [lambda x: x.max(1)[0], lambda x: x.min(1)[0]])
def test_nothing_has_no_largest(largest) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(3, 0, 4)
    fast = fusewright.optimize(Lambda(lambda m, x: largest(x)), x, modes=("eval",))
    with pytest.raises(IndexError, match="non-zero size"):
        fast(x)


ENLARGED = {
    "twice": (lambda x: F.interpolate(x, scale_factor=2), IMAGES, True),
    "a line": (lambda x: F.interpolate(x, scale_factor=3), LINES, True),
    "a volume, by sizes": (lambda x: F.interpolate(x, size=(8, 7, 24)), VOLUMES, True),
    "exact": (lambda x: F.interpolate(x, size=(27, 12), mode="nearest-exact"), IMAGES, True),
    "one axis": (lambda x: F.interpolate(x, scale_factor=(1, 5)), IMAGES, True),
    "no whole number": (lambda x: F.interpolate(x, scale_factor=1.5), IMAGES, False),
    "smaller": (lambda x: F.interpolate(x, size=(3, 4)), IMAGES, False),
    "many times": (lambda x: F.interpolate(x, scale_factor=17), LINES, False),
}


@pytest.mark.parametrize("name", ENLARGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_become_larger_in_loops(name: str, dtype: torch.dtype) -> None:
    enlarge, shape, ours = ENLARGED[name]
    model = Lambda(lambda m, x: enlarge(-x) * 2)
    x = torch.randn(shape).to(dtype)
    found = prepare(model, (x,), modes=("train",), device=x.device, target=Target.host()).modes[-1]
    assert found.backward is not None
    for plan in (found.forward, found.backward):
        names = calls(plan)
        assert not names if ours else all("upsample" in each for each in names) and names
    fast = fusewright.optimize(copy.deepcopy(model), x, modes=("train",))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = fast(mine), model(theirs)
    change = torch.randn_like(expected)
    y.backward(change)
    expected.backward(change)
    assert torch.equal(y, expected) and y.stride() == expected.stride()
    exact = x.double().requires_grad_()
    model(exact).backward(change.double())
    assert mine.grad is not None and theirs.grad is not None and exact.grad is not None
    errors = [(each.grad.double() - exact.grad).norm() for each in (mine, theirs)]  # type: ignore[union-attr]
    assert errors[0] <= 1.01 * errors[1] + 1e-6 * exact.grad.norm()


@pytest.mark.parametrize("factor", [2, 1.5])
def test_larger_images_keep_the_batch_open(factor: float) -> None:
    model = Lambda(lambda m, x: F.interpolate(x, scale_factor=factor) + 1)
    for shape in ((4, 3, 6, 8), (4, 3, 6), (4, 3, 2, 4, 6)):
        found = prepare(model, (torch.randn(shape),), device=torch.device("cpu")).modes
        assert all(each.program.symbols for each in found) and found[0].backward is not None
