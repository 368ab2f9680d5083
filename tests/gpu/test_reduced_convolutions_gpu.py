"""Convolutions with reductions in their epilogue, on a GPU; in training on trial."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fusewright.compile.pipeline import prepare
from fusewright.ir.epilogue import Reduces
from fusewright.plan import rows
from tests.support.convolution_shapes import CONVOLUTIONS
from tests.support.emulated_modules import trained as trained_all
from tests.support.gpu import needs_hopper, optimized_copy
from tests.support.tensors import error

pytestmark = [needs_hopper, pytest.mark.usefixtures("every_convolution")]


class Reduced(nn.Module):
    """Convolutions of one shape, and what reduces each result."""

    def __init__(self, arguments: dict[str, object]) -> None:
        super().__init__()
        kinds = ("batch", "pooled", "group", "channels", "first")
        self.convs = nn.ModuleDict({kind: nn.Conv2d(**arguments) for kind in kinds})  # type: ignore[arg-type]
        results = int(arguments["out_channels"])  # type: ignore[call-overload]
        self.batch, self.group = nn.BatchNorm2d(results), nn.GroupNorm(2, results)
        self.second = nn.Conv2d(results, 64, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(results, 1, 1) + 0.5)
        self.convs["batch"].bias = None  # whose gradient would be zero

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pooled = torch.tanh(self.convs["pooled"](x))
        channels = self.convs["channels"](x) * self.scale
        return (
            torch.relu(self.batch(self.convs["batch"](x))),
            torch.nn.functional.adaptive_avg_pool2d(pooled, 1),
            pooled.amax((2, 3)),
            self.group(self.convs["group"](x)),
            channels.amax(1),
            channels.mean(1),
            self.second(torch.sigmoid(self.convs["first"](x))),
        )


REDUCED = ("3x3", "1x1", "stride 2", "groups", "oblong", "wide", "deep", "small")
SMALL = ({"in_channels": 64, "out_channels": 96, "kernel_size": 1}, (50, 64, 3, 4))


@pytest.fixture
def fused_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_TRY", "fused_reductions")


def reduced_of(name: str) -> tuple[Reduced, Tensor]:
    torch.manual_seed(0)
    arguments, shape = SMALL if name == "small" else CONVOLUTIONS[name]
    model = Reduced(arguments)
    if name == "small":  # sums that cancel within a group: eager's error is 1e-6, too
        model.convs["group"].bias = None
    return model.cuda(), torch.randn(shape, device="cuda")


@pytest.fixture
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rows were too long for loops to hold them."""
    monkeypatch.setattr(rows, "ROW_BYTES", 0)


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_results_are_as_exact_as_eager(
    name: str, tf32: bool, fused_reductions: None
) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    model, x = reduced_of(name)
    planned = prepare(model, (x,), modes=("train",), device=x.device).modes[0]
    steps = [step for step in planned.forward.steps if step.kind == "convolution"]
    assert sum(step.kernel.reduces is not Reduces.NOTHING for step in steps) == 4
    fast, double = optimized_copy(model, x), copy.deepcopy(model).double()
    mine, again = trained_all(fast, x), trained_all(fast, x)
    theirs, truth = trained_all(model, x), trained_all(double, x.double())
    for y, same, e, d in zip(mine, again, theirs, truth, strict=True):
        assert torch.equal(y, same), "two runs, two results"
        assert error(y, d) <= 2 * error(e, d) + 4 * torch.finfo(torch.float32).eps  # as verify does


@pytest.mark.usefixtures("long_rows")
def test_batch_norm_keeps_the_same_statistics(fused_reductions: None) -> None:
    """For a channel with a mean far above its deviation, and after several steps."""
    torch.backends.cudnn.allow_tf32 = False
    model = nn.Sequential(nn.Conv2d(32, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()).cuda()
    with torch.no_grad():
        model[0].bias += 100.0  # type: ignore[operator]
    x = torch.randn(16, 32, 28, 28, device="cuda")
    fast, double = optimized_copy(model, x), copy.deepcopy(model).double()
    for _ in range(3):
        for each, given in ((fast, x), (model, x), (double, x.double())):
            each(given)
    for name, exact in double.named_buffers():
        mine, eager = dict(fast.named_buffers())[name], dict(model.named_buffers())[name]
        exact = exact.double()
        assert error(mine, exact) <= max(1.5 * error(eager, exact), 1e-6)


class Ended(nn.Module):
    """Only reductions read the convolutions' results."""

    def __init__(self, results: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(64, results, 3, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        over_space, over_images, most, total, *powers = (conv(x) for conv in self.convs)
        return (
            powers[0].logsumexp(1),
            torch.nn.functional.gelu(powers[1]).logsumexp((2, 3)),
            torch.nn.functional.silu(over_space).mean((2, 3)),
            over_images.amin((0, 2, 3)),
            torch.sigmoid(most).amax(1),
            total.sum(1),
        )


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(("results", "width"), [(128, 9), (128, 10), (96, 12), (40, 57), (200, 64)])
def test_results_that_nothing_else_reads_are_reduced_in_the_epilogue(
    results: int, width: int, tf32: bool, fused_reductions: None
) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    model, x = Ended(results).cuda().eval(), torch.randn(32, 64, 14, width, device="cuda")
    found = prepare(model, (x,), modes=("eval",), device=x.device).modes[0]
    steps = [step for step in found.inference.steps if step.kind == "convolution"]
    assert [step.kernel.reduces is not Reduces.NOTHING for step in steps] == [True] * 6
    fast, double = optimized_copy(model, x).eval(), copy.deepcopy(model).double()
    with torch.no_grad():
        for y, same, e, d in zip(fast(x), fast(x), model(x), double(x.double()), strict=True):
            assert torch.equal(y, same), "two runs, two results"
            assert error(y, d) <= max(1.5 * error(e, d), 6e-7)
