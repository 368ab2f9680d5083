"""Our convolutions: how graphs are rewritten and planned, and what the plans compute."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen import render as rendering
from fusewright.codegen.source import Source
from fusewright.compile.pipeline import prepare
from fusewright.ir import interpret as oracle
from fusewright.ir.convolution import ConvAxis
from fusewright.ir.graph import Dim, Node, Program, Ref, TensorSpec, contiguous_strides
from fusewright.plan import plan
from fusewright.plan.steps import Call, Plan
from fusewright.rewrite import convolutions, rewrite
from fusewright.runtime import tensor_cores
from fusewright.schedule.tensor_core import ConvolutionSchedule, choose_convolution
from fusewright.target.target import Target
from tests.support import nvcc
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import as_exact_as_eager, on_library, trained, use_tensor_cores
from tests.support.models import ParametricLambda
from tests.support.nvcc import compile_as_emitted
from tests.support.plans import input_values, steps_of
from tests.support.stubs import stub_convolutions
from tests.support.tensor_cores_on_host import on_host, with_stand_in

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
    use_tensor_cores(monkeypatch)


def rewritten(function, x: Tensor, **given: Tensor) -> Program:  # type: ignore[no-untyped-def]
    program = rewrite(capture(ParametricLambda(function, **given), (x,), mode="train"))
    sizes = program.example_sizes
    assert program.backward is not None
    return replace(
        program,
        forward=convolutions.with_convolutions(program.forward, sizes, CUDA),
        inference=convolutions.with_convolutions(program.inference, sizes, CUDA),
        backward=convolutions.with_convolutions(program.backward, sizes, CUDA),
    )


def plans(function, x: Tensor, **given: Tensor) -> tuple[Plan, Plan, Plan]:  # type: ignore[no-untyped-def]
    program = rewritten(function, x, **given)
    sizes = program.example_sizes
    assert program.backward is not None
    inference, forward, backward = (
        plan(each, sizes, Target.host())
        for each in (program.inference, program.forward, program.backward)
    )
    return inference, forward, backward


# Planning -------------------------------------------------------------------------------------


def test_a_convolution_takes_the_loop_after_it_as_epilogue() -> None:
    x = torch.randn(64, 64, 64, 64)
    inference, _, backward = plans(block, x, **parameters())
    (step,) = inference.steps
    assert step.kind == "convolution"
    assert step.operators == ("convolution", "add", "relu", "mul")
    of = step.kernel.geometry
    assert (of.groups, of.channels, of.results, of.taps) == (1, 64, 128, 9)
    assert of.x == of.y == ConvAxis(64, 64, 3, 1, 1, 1)
    assert not of.images.is_static
    assert step.kernel.filter.strides == (128 * 576, 576, 9, 0, 3, 1)
    pixels = 64 * 64 * 64 * 128
    assert step.operations == 2 * pixels * 576 + 3 * pixels
    assert step.bytes_moved == 4 * (x.numel() + 128 * 576 + 2 * 128 + pixels)
    (gradient,) = [each for each in backward.steps if each.kind == "convolution"]
    (by_weight,) = [each for each in backward.steps if each.kind == "weight_gradient"]
    assert by_weight.kernel.geometry == of
    assert by_weight.kernel.filter == replace(step.kernel.filter, buffer=by_weight.outputs[0])
    assert gradient.kernel.geometry.channels == 128 and gradient.kernel.geometry.results == 64
    assert gradient.kernel.geometry.x == replace(of.x, transposed=True)
    assert gradient.kernel.filter.strides == (128 * 576, 9, 576, 0, 3, 1)
    assert not any(isinstance(each, Call) for each in backward.steps)


def chain(m: nn.Module, x: Tensor) -> Tensor:
    y = F.conv2d(x, m.weight, stride=2, padding=1)  # type: ignore[arg-type]
    return torch.tanh(F.conv1d(y.flatten(2), m.line, dilation=2))  # type: ignore[arg-type]


def test_convolutions_with_strides_and_of_one_axis(everything: None) -> None:
    given = {"weight": torch.randn(128, 64, 3, 3), "line": torch.randn(96, 128, 5)}
    inference, _, backward = plans(chain, torch.randn(64, 64, 64, 64), **given)
    first, second = (step.kernel.geometry for step in inference.steps if step.kind == "convolution")
    assert (
        first.y == ConvAxis(64, 32, 3, 2, 1, 1) and first.y.phases == (2, 1) and first.y.halo == 1
    )
    assert second.y == ConvAxis(1, 1, 1, 1, 1, 0)
    assert second.x == ConvAxis(1024, 1016, 5, 1, 2, 0)
    found = [step.kernel.geometry for step in backward.steps if step.kind == "convolution"]
    assert [each.x.stride for each in found] == [1, 2]
    assert found[1].y == ConvAxis(32, 64, 3, 2, 1, 1, transposed=True)
    assert found[1].y.phases == (1, 2) and found[1].phases == (1, 2, 2, 4)
    assert (found[1].y.positions, found[1].y.halo) == (32, 1)
    assert found[1].operations({"s0": 64}) == first.operations({"s0": 64})
    assert not any(isinstance(step, Call) for step in backward.steps)


def grown(m: nn.Module, x: Tensor) -> Tensor:
    settings = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}
    return torch.relu(F.conv_transpose2d(x, m.weight, m.bias, **settings)) * m.scale  # type: ignore[arg-type,operator]


def test_a_transposed_convolution_takes_the_loop_after_it_as_epilogue(everything: None) -> None:
    given = {"weight": torch.randn(64, 48, 4, 4), "bias": torch.randn(96)}
    inference, _, backward = plans(
        grown, torch.randn(16, 64, 14, 15), **given, scale=torch.randn(96, 1, 1)
    )
    (step,) = inference.steps
    assert step.kind == "convolution"
    assert step.operators == ("convolution", "add", "relu", "mul")
    of = step.kernel.geometry
    assert (of.groups, of.channels, of.results) == (2, 32, 48)
    assert of.y == ConvAxis(14, 29, 4, 2, 1, 1, transposed=True)
    assert (of.y.positions, of.y.phases, of.y.halo) == (15, (2, 2), 1)
    assert step.kernel.filter.strides == (32 * 48 * 16, 16, 48 * 16, 0, 4, 1)
    (by_source,) = [each.kernel for each in backward.steps if each.kind == "convolution"]
    (by_weight,) = [each.kernel for each in backward.steps if each.kind == "weight_gradient"]
    assert by_source.geometry == by_weight.geometry
    assert by_source.geometry.y == ConvAxis(29, 14, 4, 2, 1, 1)
    numbers = ((2, 2), (1, 1), (1, 1), True, (1, 1), 2)
    for kernel in (step.kernel, by_source, by_weight):
        assert kernel.instead.source.shape[1:] == (Dim(64), Dim(14), Dim(15))
        assert kernel.instead.weight.shape[0] == Dim(64) and kernel.instead.numbers == numbers
    assert not any(isinstance(each, Call) for each in backward.steps)


@pytest.mark.parametrize(
    ("function", "x", "why"),
    [
        (lambda m, x: F.conv2d(x, m.weight), torch.randn(1, 64, 8, 8), ""),
        (lambda m, x: F.conv_transpose2d(x, m.weight[:64]), torch.randn(1, 64, 8, 8), ""),
        (
            lambda m, x: F.conv2d(x.double(), m.weight.double()),
            torch.randn(16, 64, 64, 64),
            "float64",
        ),
        (
            lambda m, x: F.conv2d(x, m.weight[:, :2], None, 1, 60, 60, 32),  # taps are far apart
            torch.randn(16, 64, 64, 64),
            "32 groups of fewer than 16 channels",
        ),
        (
            lambda m, x: F.conv3d(x[:, :, None].half(), m.weight[:, :, None].half()),
            torch.randn(16, 64, 64, 64),
            "float16",
        ),
        (
            lambda m, x: F.conv_transpose2d(x, m.weight[:64], stride=5),
            torch.randn(16, 64, 64, 64),
            "strides this wide or this many taps",
        ),
    ],
)
def test_which_convolutions_are_left_to_pytorch(function, x: Tensor, why: str) -> None:  # type: ignore[no-untyped-def]
    program = rewritten(function, x, weight=torch.randn(128, 64, 3, 3))
    assert program.backward is not None
    graphs = {"convolution": program.inference, "convolution gradients": program.backward}
    for kind, graph in graphs.items():
        each = plan(graph, program.example_sizes, CUDA)
        assert not any(step.kind == "convolution" for step in each.steps)
        calls = [step for step in each.steps if isinstance(step, Call)]
        (reason,) = [step.reason for step in calls if "convolution" in step.node.op]
        faster = "it is faster than our kernel at this size"
        told = f"our kernel does not support {why}" if why else faster
        assert reason == f"PyTorch's {kind}: {told}"


def test_channels_far_apart_are_left_to_pytorch() -> None:
    """The kernels use 32-bit strides between channels."""

    def spec(*shape: int, apart: int | None = None) -> TensorSpec:
        sizes = tuple(map(Dim, shape))
        strides = contiguous_strides(sizes)
        strides = strides if apart is None else (strides[0], Dim(apart), *strides[2:])
        return TensorSpec("float32", sizes, strides)

    args = (Ref("x"), Ref("w"), (1, 1), (1, 1), (1, 1), 1, False)
    node = Node("y", convolutions.CONVOLUTION, args, spec=spec(8, 128, 32, 32))
    weight = spec(128, 64, 3, 3)
    for apart, why in ((2**31 - 1, ""), (2**31, "channels that are 2^31 or more elements apart")):
        assert convolutions.obstacle(node, spec(8, 64, 32, 32, apart=apart), weight) == why


def test_an_input_that_backward_needs_in_channels_last_is_read_so() -> None:
    """A strided convolution alone is ours. If PyTorch's weight gradient reads the input in
    channels-last, PyTorch's convolution before it does too."""
    model = nn.Sequential(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.SiLU())
    x = torch.randn(64, 32, 112, 112)
    found = prepare(model, (x,), modes=("train",), device=torch.device("cpu"), target=Target.cuda())
    plans = found.modes[0]
    assert any(step.kind == "convolution" for step in plans.inference.steps)
    assert not any(step.kind == "convolution" for step in plans.forward.steps)


def test_small_batches_are_left_to_other_programs() -> None:
    model = ParametricLambda(block, **parameters())
    made = prepare(model, (torch.randn(64, 64, 64, 64),), device=torch.device("cpu"), target=CUDA)
    assert made.modes[0].worth is not None
    assert made.modes[0].worth[0] == "s0" and 1 < made.modes[0].worth[1] <= 64


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.conv2d(m.image, x[0]),
        lambda m, x: F.conv2d(m.image, x.transpose(0, 1).contiguous()[:, 0]),
    ],
)
def test_weights_with_strides_of_the_batch_stay_pytorchs(function, everything: None) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(5, 7, 4, 3, 3).transpose(0, 1)
    inference, _, _ = plans(function, x, image=torch.randn(2, 4, 9, 9))
    assert not any(step.kind == "convolution" for step in inference.steps)


def test_one_setting_may_serve_both_axes(everything: None) -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        return F.conv2d(x, m.weight, None, [1], [1], [2])  # type: ignore[arg-type,call-overload,no-any-return]

    inference, _, _ = plans(function, torch.randn(2, 4, 9, 10), weight=torch.randn(3, 4, 3, 3))
    (step,) = steps_of(inference, "convolution")
    assert step.kind == "convolution"
    assert step.kernel.geometry.x == ConvAxis(10, 8, 3, 1, 2, 1)


# Meaning --------------------------------------------------------------------------------------


def grouped(m: nn.Module, x: Tensor) -> Tensor:
    y = F.conv2d(x, m.weight, groups=2, stride=(1, 2), padding=(0, 2), dilation=(2, 1))  # type: ignore[arg-type]
    return torch.sigmoid(y)


def one_axis(m: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(F.conv1d(x.flatten(2), m.weight[:, :, 0], padding=2))  # type: ignore[index]


def transposed(m: nn.Module, x: Tensor) -> Tensor:
    settings = {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 2), "groups": 2}
    y = F.conv_transpose2d(x, m.weight, m.bias, **settings)  # type: ignore[arg-type]
    return torch.relu(y) * m.scale  # type: ignore[operator,no-any-return]


def padded(m: nn.Module, x: Tensor) -> Tensor:
    """Output padding as wide as the stride."""
    settings = {"stride": 2, "padding": 3, "output_padding": 2, "dilation": 3}
    return torch.tanh(F.conv_transpose2d(x, m.weight, **settings))  # type: ignore[arg-type]


def transposed_lines(m: nn.Module, x: Tensor) -> Tensor:
    return torch.sigmoid(F.conv_transpose1d(x.flatten(2), m.weight, stride=3, padding=1))  # type: ignore[arg-type]


CASES = [
    (block, {"weight": (5, 6, 3, 3), "bias": (5,), "scale": (5, 1, 1)}),
    (grouped, {"weight": (4, 3, 3, 3)}),
    (one_axis, {"weight": (7, 6, 2, 3)}),
    (transposed, {"weight": (6, 2, 3, 2), "bias": (4,), "scale": (4, 1, 1)}),
    (padded, {"weight": (6, 4, 3, 2)}),
    (transposed_lines, {"weight": (6, 4, 5)}),
]


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(("model", "shapes"), CASES)
def test_the_rewritten_graphs_mean_the_same(model, shapes, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(convolutions, "FEWEST_CHANNELS", 1)
    x, given = torch.randn(3, 6, 9, 10), {name: torch.randn(s) for name, s in shapes.items()}
    plain = rewrite(capture(ParametricLambda(model, **given), (x,), mode="train"))
    ours = rewritten(model, x, **given)
    sizes = plain.example_sizes
    for name in ("inference", "forward", "backward"):
        before, after = getattr(plain, name), getattr(ours, name)
        held = input_values(before, sizes)
        ops = {node.op for node in after.nodes}
        assert "fused_convolution" in ops and not any("aten.convolution" in op for op in ops)
        assert ("weight_gradient" in ops) == (name == "backward")
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


class Growing(nn.Module):
    """Transposed layers of two ranks, an output that is read twice, a row for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 12, 5, stride=(3, 2), padding=2)
        self.up = nn.ConvTranspose2d(12, 6, 3, stride=(3, 2), padding=1, output_padding=(2, 1))
        self.line = nn.ConvTranspose1d(6, 9, 2, stride=3, output_padding=1, bias=False)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.silu(self.up(F.gelu(self.down(x))) * self.scale + x.mean((1, 2, 3), True))
        return torch.tanh(self.line(hidden.flatten(2))), hidden.mean((2, 3))


class Heads(nn.Module):
    """Channels that are seen as several axes."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Conv2d(3, 24, 3, padding=1)
        self.line = nn.Conv1d(24, 16, 3)
        self.scale = nn.Parameter(torch.randn(4, 1, 1, 12))
        self.head = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plane(x).view(x.shape[0], 4, 6, 8, 12) * self.scale
        line = self.line(hidden.flatten(3).flatten(1, 2))
        return torch.tanh(line.view(x.shape[0], 4, 4, -1) * self.head)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("kind", "layers", "batches"),
    [(Images, 2, (2, 3)), (Images, 2, (1,)), (Growing, 3, (2, 3)), (Heads, 2, (2, 3))],
)
def test_emulated_modules_train_as_eager_does(  # type: ignore[no-untyped-def]
    kind: type[nn.Module], layers: int, batches: tuple[int, ...], asked: list[str], monkeypatch
) -> None:
    """The emitted text over the CUDA source, with g++ for nvcc and loops for the kernel."""
    stub_convolutions(monkeypatch)
    model, x = kind(), torch.randn(batches[0], 3, 8, 12)
    prepared = prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)
    (plans_,) = prepared.modes
    assert sum(step.kind == "convolution" for step in plans_.forward.steps) == layers
    assert plans_.backward is not None
    assert not any(isinstance(step, Call) for step in plans_.backward.steps)
    fast = on_library(model, x, prepared, emulated(prepared.source))
    for images in batches:
        x = torch.randn(images, 3, 8, 12)
        exactly = copy.deepcopy(model).double()
        results = [trained(each, given) for each, given in ((fast, x), (exactly, x.double()))]
        for ours, truth in zip(*results, strict=True):
            largest = truth.abs().max().item()
            torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5 * largest)
    # How precise PyTorch would be is asked for every pass, at each size.
    passes = ("forward", "input", "weight")
    assert Counter(asked) == dict.fromkeys(passes, layers * len(batches))


@pytest.mark.usefixtures("everything", "asked")
def test_modules_train_on_emulated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here generated epilogues get the positions that the kernel computes."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    model, x = Growing(), torch.randn(2, 3, 8, 12)
    found = prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)
    source = Source("host", on_host(found.source.text), found.source.entries)
    as_exact_as_eager(on_library(model, x, found, source), model, x, 2e-6)


def test_the_heuristic_fits_tiles_to_the_results() -> None:
    inference, _, _ = plans(block, torch.randn(64, 64, 64, 64), **parameters(48))
    (step,) = steps_of(inference, "convolution")
    assert step.kind == "convolution"
    chosen = choose_convolution(step.kernel, CUDA, {"s0": 64})
    assert isinstance(chosen, ConvolutionSchedule) and chosen.tile_channels == 64


@pytest.mark.sample(2)
@nvcc.needed
@pytest.mark.parametrize("terms", [1, 3])
def test_the_source_compiles_for_both_architectures(terms: int, tmp_path: Path) -> None:
    model, x = ParametricLambda(block, **parameters()), torch.randn(16, 64, 64, 64)
    prepared = prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)
    compile_as_emitted(prepared.source, tmp_path, terms)
