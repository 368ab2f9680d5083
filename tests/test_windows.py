"""Convolutions of ours: how graphs are rewritten and planned, and what the plans compute."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import interpret as oracle
from fusewright.capture import capture
from fusewright.codegen import render as rendering
from fusewright.ir import Dim, Program
from fusewright.pipeline import prepare
from fusewright.plan import plan
from fusewright.plan.steps import Call, Plan, Window, WindowGradient
from fusewright.rewrite import rewrite, windows
from fusewright.runtime import tensor_cores
from fusewright.schedule import Target, choose_window
from fusewright.window import Geometry, WindowAxis
from fusewright.window_cost import (
    band_widths,
    best_band,
    fits,
    gradient_parts,
    is_possible,
    is_worthwhile,
)
from tests.emulated_modules import on_library, trained
from tests.loop_cases import NVCC
from tests.test_cuda_emulated import emulated
from tests.test_plan import Lambda
from tests.test_product_text import compiled
from tests.test_products import values_of

STUB = Path(__file__).parent / "convolution_on_host.cuh"
CUDA = Target.cuda()


def block(m: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(F.conv2d(x, m.weight, m.bias, padding=1)) * m.scale  # type: ignore[arg-type,operator]


def parameters(out: int = 128, channels: int = 64, size: int = 3) -> dict[str, Tensor]:
    return {
        "weight": torch.randn(out, channels, size, size),
        "bias": torch.randn(out),
        "scale": torch.randn(out, 1, 1),
    }


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones too."""
    monkeypatch.setattr(windows, "is_worthwhile", lambda *_: True)


def rewritten(function, x: Tensor, **given: Tensor) -> Program:  # type: ignore[no-untyped-def]
    program = rewrite(capture(Lambda(function, **given), (x,), mode="train"))
    sizes = program.example_sizes
    assert program.backward is not None
    return replace(
        program,
        forward=windows.with_windows(program.forward, sizes),
        inference=windows.with_windows(program.inference, sizes),
        backward=windows.with_windows(program.backward, sizes),
    )


def plans(function, x: Tensor, **given: Tensor) -> tuple[Plan, Plan, Plan]:  # type: ignore[no-untyped-def]
    program = rewritten(function, x, **given)
    sizes = program.example_sizes
    assert program.backward is not None
    inference, forward, backward = (
        plan(each, sizes) for each in (program.inference, program.forward, program.backward)
    )
    return inference, forward, backward


# Planning -------------------------------------------------------------------------------------


def test_what_follows_a_convolution_is_part_of_it() -> None:
    x = torch.randn(16, 64, 64, 64)
    inference, _, backward = plans(block, x, **parameters())
    (step,) = inference.steps
    assert isinstance(step, Window)
    assert step.operators == ("convolution", "add", "relu", "mul")
    of = step.kernel.geometry
    assert (of.groups, of.channels, of.results, of.taps) == (1, 64, 128, 9)
    assert of.x == of.y == WindowAxis(64, 64, 3, 1, 1, 1)
    assert not of.images.is_static
    assert step.kernel.filter.strides == (576, 9, 3, 1) and step.kernel.filter.offset == 0
    pixels = 16 * 64 * 64 * 128
    assert step.operations == 2 * pixels * 576 + 3 * pixels
    assert step.bytes_moved == 4 * (x.numel() + 128 * 576 + 2 * 128 + pixels)
    (gradient,) = [each for each in backward.steps if isinstance(each, Window)]
    (by_weight,) = [each for each in backward.steps if isinstance(each, WindowGradient)]
    assert by_weight.kernel.geometry == of and by_weight.kernel.filter.strides == (576, 9, 3, 1)
    assert gradient.kernel.geometry.channels == 128 and gradient.kernel.geometry.results == 64
    assert gradient.kernel.geometry.x.before == 1
    assert gradient.kernel.filter.strides == (9, 576, -3, -1) and gradient.kernel.filter.offset == 8
    assert not any(isinstance(each, Call) for each in backward.steps)


def chain(m: nn.Module, x: Tensor) -> Tensor:
    y = F.conv2d(x, m.weight, stride=2, padding=1)  # type: ignore[arg-type]
    return torch.tanh(F.conv1d(y.flatten(2), m.line, dilation=2))  # type: ignore[arg-type]


def test_strides_and_lines() -> None:
    given = {"weight": torch.randn(128, 64, 3, 3), "line": torch.randn(96, 128, 5)}
    inference, _, backward = plans(chain, torch.randn(64, 64, 64, 64), **given)
    first, second = (step.kernel.geometry for step in inference.steps if isinstance(step, Window))
    assert (
        first.y == WindowAxis(64, 32, 3, 2, 1, 1) and first.y.phases == (2, 1) and first.y.halo == 1
    )
    assert second.y == WindowAxis(1, 1, 1, 1, 1, 0)
    assert second.x == WindowAxis(1024, 1016, 5, 1, 2, 0)
    # The gradient of a convolution with wide strides is left to PyTorch.
    assert sum(isinstance(step, Window) for step in backward.steps) == 1


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda m, x: F.conv2d(x, m.weight), torch.randn(1, 64, 8, 8)),
        (lambda m, x: F.conv2d(x.double(), m.weight.double()), torch.randn(16, 64, 64, 64)),
        (lambda m, x: F.conv2d(x, m.weight[:, :1], groups=64), torch.randn(16, 64, 64, 64)),
        (lambda m, x: F.conv_transpose2d(x, m.weight[:64]), torch.randn(16, 64, 32, 32)),
    ],
)
def test_what_is_left_to_pytorch(function, x: Tensor) -> None:  # type: ignore[no-untyped-def]
    inference, _, _ = plans(function, x, weight=torch.randn(128, 64, 3, 3))
    assert not any(isinstance(step, Window) for step in inference.steps)


def test_small_batches_are_left_to_the_plain_program() -> None:
    model = Lambda(block, **parameters())
    made = prepare(model, (torch.randn(64, 64, 64, 64),), device=torch.device("cpu"), target=CUDA)
    ours, plain, *_ = made.modes
    (guard,) = set(ours.program.guards) - set(plain.program.guards)
    assert 1 < int(guard.removeprefix("s0 >= ")) <= 64


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.conv2d(m.image, x[0]),
        lambda m, x: F.conv2d(m.image, x.transpose(0, 1).contiguous()[:, 0]),
    ],
)
def test_weights_that_lie_as_the_batch_says_stay_pytorchs(function, everything: None) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(5, 7, 4, 3, 3).transpose(0, 1)
    inference, _, _ = plans(function, x, image=torch.randn(2, 4, 9, 9))
    assert not any(isinstance(step, Window) for step in inference.steps)


def test_one_number_may_stand_for_both_axes(everything: None) -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        return F.conv2d(x, m.weight, None, [1], [1], [2])  # type: ignore[arg-type,call-overload,no-any-return]

    inference, _, _ = plans(function, torch.randn(2, 4, 9, 10), weight=torch.randn(3, 4, 3, 3))
    (step,) = inference.on_cores
    assert isinstance(step, Window)
    assert step.kernel.geometry.x == WindowAxis(10, 8, 3, 1, 2, 1)


def geometry(size: int, taps: int, stride: int = 1, dilation: int = 1) -> Geometry:
    result = (size - dilation * (taps - 1) - 1) // stride + 1
    axis = WindowAxis(size, result, taps, stride, dilation, 0)
    return Geometry(Dim(16), 1, 64, 128, axis, axis)


@pytest.mark.parametrize(
    ("size", "taps", "stride", "dilation"),
    [(7, 3, 1, 1), (130, 3, 1, 1), (226, 3, 1, 1), (1000, 3, 1, 1), (230, 7, 2, 1), (256, 3, 1, 8)],
)
def test_bands_find_room(size: int, taps: int, stride: int, dilation: int) -> None:
    of = geometry(size, taps, stride, dilation)
    band = best_band(of)
    assert band is not None and fits(of, band) and is_possible(of)
    widths = list(band_widths(of))
    assert band in widths and widths[0] == of.x.result and all(w % 4 == 0 for w in widths[1:])
    assert of.x.result <= 200 or band < of.x.result


def test_gradients_are_divided_among_all_processors() -> None:
    of = geometry(130, 3)
    assert gradient_parts(of, 128, {}, 132) == 66, "two tiles of 64 results, nine taps in one set"
    assert gradient_parts(replace(of, images=Dim(1), channels=2048), 128, {}, 132) == 2
    assert gradient_parts(replace(of, images=Dim(0)), 128, {}, 132) == 1


def test_too_many_taps_are_left_to_pytorch() -> None:
    assert not is_possible(geometry(200, 13)) and not is_possible(geometry(400, 3, 5))
    assert is_worthwhile(geometry(130, 3), {}) and not is_worthwhile(geometry(4, 3), {})


# Meaning --------------------------------------------------------------------------------------


def grouped(m: nn.Module, x: Tensor) -> Tensor:
    y = F.conv2d(x, m.weight, groups=2, stride=(1, 2), padding=(0, 2), dilation=(2, 1))  # type: ignore[arg-type]
    return torch.sigmoid(y)


def lines(m: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(F.conv1d(x.flatten(2), m.weight[:, :, 0], padding=2))  # type: ignore[index]


CASES = [
    (block, {"weight": (5, 6, 3, 3), "bias": (5,), "scale": (5, 1, 1)}),
    (grouped, {"weight": (4, 3, 3, 3)}),
    (lines, {"weight": (7, 6, 2, 3)}),
]


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(("model", "shapes"), CASES)
def test_the_rewritten_graphs_mean_the_same(model, shapes, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(windows, "FEWEST_CHANNELS", 1)
    x, given = torch.randn(3, 6, 9, 10), {name: torch.randn(s) for name, s in shapes.items()}
    plain = rewrite(capture(Lambda(model, **given), (x,), mode="train"))
    ours = rewritten(model, x, **given)
    sizes = plain.example_sizes
    for name in ("inference", "forward", "backward"):
        before, after = getattr(plain, name), getattr(ours, name)
        held = values_of(before, sizes)
        ops = {node.op for node in after.nodes}
        assert ("window" in ops) == (model is not grouped or name != "backward")
        assert ("window_gradient" in ops) == (name == "backward")
        theirs = oracle.interpret(before, held, sizes, exact=False)
        mine = oracle.interpret(after, held, sizes, exact=False)
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(b, Tensor) and b.is_floating_point():
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


class Images(nn.Module):
    """Two layers, a pooled one between, an output that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.second = nn.Conv2d(12, 6, (2, 3), stride=(1, 2), bias=False)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.first(x))
        return torch.tanh(self.second(hidden)) * self.scale, hidden.mean((2, 3))


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("batches", [(2, 3), (1,)])
def test_emulated_modules_train_as_eager_does(
    batches: tuple[int, ...], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emitted text over the CUDA source, with g++ for nvcc and loops for the kernel."""
    for name in ("WINDOW_HEADER", "GRADIENT_HEADER"):
        monkeypatch.setattr(rendering, name, str(STUB))
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    model, x = Images(), torch.randn(batches[0], 3, 8, 12)
    prepared = prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)
    assert [each.name for each in prepared.modes] == ["train_products", "train"]
    plans_ = prepared.modes[0]
    assert sum(isinstance(step, Window) for step in plans_.forward.steps) == 2
    fast = on_library(model, x, prepared, emulated(prepared.source))
    for images in batches:
        x = torch.randn(images, 3, 8, 12)
        exactly = copy.deepcopy(model).double()
        results = [trained(each, given) for each, given in ((fast, x), (exactly, x.double()))]
        for ours, truth in zip(*results, strict=True):
            largest = truth.abs().max().item()
            torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5 * largest)
    # How precise PyTorch would be is asked for every pass, at each size.
    each = len(batches)
    assert Counter(asked) == {"forward": 2 * each, "input": each, "weight": 2 * each}


def test_the_heuristic_fits_tiles_to_the_results() -> None:
    inference, _, _ = plans(block, torch.randn(64, 64, 64, 64), **parameters(48))
    (step,) = inference.on_cores
    assert isinstance(step, Window) and choose_window(step.kernel).tile_channels == 64


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("arch", "terms"), [("80", 3), ("90a", 3), ("90a", 1)])
def test_the_source_compiles_for_both(arch: str, terms: int, tmp_path: Path) -> None:
    model, x = Lambda(block, **parameters()), torch.randn(16, 64, 64, 64)
    prepared = prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)
    compiled(prepared.source, arch, tmp_path, terms)
