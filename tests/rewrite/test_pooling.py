"""Pooling and largest values: what becomes a loop, what stays PyTorch's, and the results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.compile.pipeline import prepare
from tests.support.models import Lambda
from tests.support.plans import called_operators
from tests.support.side_by_side import SideBySide, optimized

Pool = Callable[[Tensor], Tensor]
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
    # Without a gradient: PyTorch's own writes behind its memory there.
    "nothing but padding": (
        lambda x: F.max_pool1d(x[..., :1].detach(), 2, 1, padding=1, dilation=2),
        LINES,
    ),
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
    "many overlapping taps": (lambda x: F.avg_pool2d(x, (7, 6), 2), IMAGES),
    "places along an axis": (lambda x: x.max(1)[1], IMAGES),
}


LAST = {IMAGES: torch.channels_last, VOLUMES: torch.channels_last_3d}
TOGETHER = 8  # more take longer to plan than g++ takes to start


@pytest.mark.sample(3)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("first", range(0, len(OURS), TOGETHER))
def test_which_pools_become_loops(first: int, last: bool) -> None:
    pools = dict(list(OURS.items())[first : first + TOGETHER])
    model = SideBySide(lambda x, p=pool: p(x * 0.5 - 1) * 2 + 1 for pool, _ in pools.values())
    orders = LAST if last else {}
    inputs = [
        torch.randn(shape).contiguous(memory_format=orders.get(shape, torch.contiguous_format))
        for _, shape in pools.values()
    ]
    fast, mode = optimized(model, *inputs, mode="eval")
    loops = [step for step in mode.inference.steps if step.kind == "loop"]
    # Small ones over equal axes share a launch.
    assert not called_operators(mode.inference) and len(loops) <= len(pools)
    grown = [torch.randn_like(torch.cat((x, x))) for x in inputs]
    for given in (inputs, grown, [x * math.inf for x in inputs]):
        with torch.no_grad():
            found = zip(pools, fast(*given), model(*given), strict=True)
        for name, ours, eager in found:
            torch.testing.assert_close(
                ours, eager, rtol=2e-6, atol=2e-7, equal_nan=True, msg=lambda m, n=name: f"{n}\n{m}"
            )
            assert given is not inputs or ours.stride() == eager.stride(), name


@pytest.mark.parametrize("name", PYTORCHS)
def test_which_pools_stay_pytorchs(name: str) -> None:
    pool, shape = PYTORCHS[name]
    x = torch.randn(shape)
    fast, mode = optimized(Lambda(lambda x: pool(x)), x, mode="eval")
    assert called_operators(mode.inference)
    with torch.no_grad():
        assert torch.equal(fast(x), pool(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    x = torch.randn(IMAGES).to(dtype)
    pools = (lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2))
    fast, _ = optimized(SideBySide(pools), x, x.clone(), mode="eval")
    with torch.no_grad():
        for ours, pool in zip(fast(x, x.clone()), pools, strict=True):
            assert torch.equal(ours, pool(x))


def test_nan_is_the_largest_and_the_smallest() -> None:
    x = torch.randn(2, 3, 4, 6)
    x[0, 1, 2, 3], x[1, 2, 0, 0], x[1, 0, 3, 5] = math.nan, math.inf, -math.inf
    pools = (lambda x: F.max_pool2d(x, 2), lambda x: x.min(1)[0], lambda x: x.max(3)[0])
    inputs = [x.clone() for _ in pools]
    fast, _ = optimized(SideBySide(pools), *inputs, mode="eval")
    with torch.no_grad():
        for ours, pool in zip(fast(*inputs), pools, strict=True):
            torch.testing.assert_close(ours, pool(x), rtol=0, atol=0, equal_nan=True)


def test_the_largest_integer() -> None:
    x = torch.randint(-9, 9, (5, 7, 3))
    fast = fusewright.optimize(Lambda(lambda x: x.max(1)[0] - x.min(1)[0]), x, modes=("eval",))
    assert torch.equal(fast(x), x.max(1)[0] - x.min(1)[0])


OUR_GRADIENTS = (
    (lambda x: F.avg_pool2d(x, (3, 2)), (2, 3, 9, 12)),
    (lambda x: F.avg_pool3d(x, 2), (2, 3, 4, 6, 8)),
    (lambda x: F.avg_pool1d(x, 4), (2, 3, 16)),
    (lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, (2, 3), 1, (1, 0)), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3), (2, 3, 9, 12)),
    (lambda x: F.avg_pool3d(x, 2, 1, 1), (2, 3, 4, 6, 8)),
    (lambda x: F.avg_pool1d(x, 5, 1, 2), (2, 3, 16)),
    (lambda x: F.avg_pool2d(x, 2), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 4, 3, 2, count_include_pad=False), (2, 3, 10, 13)),
    (lambda x: F.avg_pool2d(x, (7, 6), (2, 3)), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 2, (1, 3), divisor_override=5), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 2, 4), (2, 3, 9, 12)),
    (lambda x: F.avg_pool2d(x, 1, 2), (2, 3, 9, 12)),
    (lambda x: F.avg_pool3d(x, 3, 2, 1), (2, 3, 4, 6, 8)),
    (lambda x: F.avg_pool1d(x, 4, 2, 1), (2, 3, 17)),
    (lambda x: F.max_pool2d(x, 2), (2, 3, 9, 12)),
)
PYTORCHS_GRADIENTS = (
    (lambda x: F.avg_pool2d(x, 7, 1), (2, 3, 9, 12)),
    (lambda x: F.max_pool2d(x, 7), (2, 3, 9, 12)),
    (lambda x: x.max(2)[0], (2, 3, 9, 12)),
)


@pytest.mark.parametrize("whose", [OUR_GRADIENTS, PYTORCHS_GRADIENTS], ids=["ours", "PyTorch's"])
def test_gradients(whose: tuple[tuple[Pool, tuple[int, ...]], ...]) -> None:
    """The last window of nine rows leaves one row over, whose gradient is zero."""
    model = SideBySide(lambda x, p=pool: torch.tanh(p(torch.sigmoid(x))) for pool, _ in whose)
    inputs = [torch.randn(shape) for _, shape in whose]
    fast, mode = optimized(model, *inputs)
    assert mode.backward is not None
    called = [
        op for op in called_operators(mode.backward) if op != "aten.max.dim"
    ]  # indices, found again
    assert len(called) == (len(whose) if whose is PYTORCHS_GRADIENTS else 0)
    found = []
    for each in (fast, model):
        given = [x.clone().requires_grad_() for x in inputs]
        made = each(*given)
        changes = [torch.cos(y.detach() * 3) for y in made]
        found.append((*made, *torch.autograd.grad(made, given, changes)))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("taps", "shape", "is_ours"),
    [
        ((9, 9), (2, 3, 9, 9), True),  # one window
        ((3, 40), (2, 3, 9, 81), True),  # rows of more than a cache line
        ((11, 11), (2, 3, 24, 24), False),
    ],
)
def test_large_windows_with_short_rows_are_pytorchs(
    taps: tuple[int, int], shape: tuple[int, ...], is_ours: bool
) -> None:
    """Threads that share a window would read parts of cache lines."""
    x = torch.randn(shape)
    fast, mode = optimized(Lambda(lambda x: F.avg_pool2d(x, taps) * 2), x)
    assert called_operators(mode.inference) == ([] if is_ours else ["aten.avg_pool2d.default"])
    torch.testing.assert_close(fast(x), F.avg_pool2d(x, taps) * 2)


@pytest.mark.parametrize("largest", [lambda x: x.max(1)[0], lambda x: x.min(1)[0]])
def test_the_largest_of_an_empty_axis_is_an_error(largest) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(3, 0, 4)
    fast = fusewright.optimize(Lambda(lambda x: largest(x)), x, modes=("eval",))
    with pytest.raises(IndexError, match="non-zero size"):
        fast(x)


OUR_ENLARGED = {
    "twice": (lambda x: F.interpolate(x, scale_factor=2), IMAGES),
    "a line": (lambda x: F.interpolate(x, scale_factor=3), LINES),
    "a volume, by sizes": (lambda x: F.interpolate(x, size=(8, 7, 24)), VOLUMES),
    "exact": (lambda x: F.interpolate(x, size=(27, 12), mode="nearest-exact"), IMAGES),
    "one axis": (lambda x: F.interpolate(x, scale_factor=(1, 5)), IMAGES),
}
PYTORCHS_ENLARGED = {
    "no whole number": (lambda x: F.interpolate(x, scale_factor=1.5), IMAGES),
    "smaller": (lambda x: F.interpolate(x, size=(3, 4)), IMAGES),
    "many times": (lambda x: F.interpolate(x, scale_factor=17), LINES),
    "linear": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), LINES),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "trilinear": (lambda x: F.interpolate(x, size=(8, 7, 9), mode="trilinear"), VOLUMES),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), IMAGES),
    "corners": (
        lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True),
        IMAGES,
    ),
}


@pytest.mark.parametrize("whose", [OUR_ENLARGED, PYTORCHS_ENLARGED], ids=["ours", "PyTorch's"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upsampling_becomes_a_loop(
    whose: dict[str, tuple[Pool, tuple[int, ...]]], dtype: torch.dtype
) -> None:
    model = SideBySide(lambda x, e=enlarge: e(-x) * 2 for enlarge, _ in whose.values())
    inputs = [torch.randn(shape).to(dtype) for _, shape in whose.values()]
    fast, mode = optimized(model, *inputs)
    assert mode.backward is not None
    for plan in (mode.forward, mode.backward):
        upsampled = ["upsample" in each for each in called_operators(plan)]
        assert upsampled == [True] * (len(whose) if whose is PYTORCHS_ENLARGED else 0)
    with torch.no_grad():
        changes = [torch.randn_like(y) for y in model(*inputs)]
    mine, theirs = (trained(each, inputs, changes) for each in (fast, model))
    exact = trained(model, *([t.double() for t in each] for each in (inputs, changes)))
    for at, name in enumerate(whose):
        (y, gradient), (expected, eager), (_, truth) = mine[at], theirs[at], exact[at]
        assert torch.equal(y, expected) and y.stride() == expected.stride(), name
        errors = [(each.double() - truth).norm() for each in (gradient, eager)]
        assert errors[0] <= 1.01 * errors[1] + 1e-6 * truth.norm(), name


def trained(
    model: nn.Module, inputs: list[Tensor], changes: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Each result with the gradient of its input."""
    given = [x.clone().requires_grad_() for x in inputs]
    made = model(*given)
    return list(zip(made, torch.autograd.grad(made, given, changes), strict=True))


BETWEEN = {3: "linear", 4: "bilinear", 5: "trilinear"}


@pytest.mark.parametrize("factor", [2, 1.5])
@pytest.mark.parametrize("nearest", [True, False])
def test_upsampling_keeps_the_batch_dynamic(factor: float, nearest: bool) -> None:
    for shape in ((4, 3, 6, 8), (4, 3, 6), (4, 3, 2, 4, 6)):
        kind = "nearest" if nearest else BETWEEN[len(shape)]
        model = Lambda(lambda x, kind=kind: F.interpolate(x, None, factor, kind) + 1)
        found = prepare(model, (torch.randn(shape),), device=torch.device("cpu")).modes
        assert all(each.program.symbols for each in found) and found[0].backward is not None


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "trilinear"])
def test_upsampling_keeps_channels_last(kind: str, smooth: bool) -> None:
    shape, last = IMAGES, torch.channels_last
    if kind == "trilinear":
        shape, last, smooth = VOLUMES, torch.channels_last_3d, False
    x = torch.randn(shape).to(memory_format=last)
    model = SideBySide([lambda x: F.interpolate(x * 2, None, 2, kind, antialias=smooth)])
    fast = fusewright.optimize(model, [x])
    with torch.no_grad():
        change = torch.randn_like(model(x)[0])
    mine, theirs = (trained(each, [x], [change])[0] for each in (fast, model))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


def test_upsampling_of_bytes_rounds_as_eager_does() -> None:
    """PyTorch rounds each of two passes over uint8."""
    model = Lambda(lambda x: F.interpolate(x, (7, 9), mode="bilinear"))
    x = torch.randint(0, 255, (2, 3, 5, 4), dtype=torch.uint8)
    assert torch.equal(fusewright.optimize(model, x)(x), model(x))
