"""Convolutions with reductions in their epilogue: the kernels by emulation."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen import convolution as convolution_text
from fusewright.codegen import render as rendering
from fusewright.codegen.convolution import convolution_forms
from fusewright.codegen.source import Source
from fusewright.schedule import tensor_core
from tests.support.emulated_modules import (
    INFERRED,
    TRAINED,
    as_exact_as_eager,
    of_kernels,
    on_library,
)
from tests.support.reduced_convolutions import (
    SHAPES,
    Layer,
    Layers,
    compare,
    convolutions_of,
    emulated,
    emulated_source,
    layers,
    prepared,
)
from tests.support.tensor_cores_on_host import host_library, on_host, with_stand_in

pytestmark = pytest.mark.usefixtures("reduces_small_convolutions")


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_as_exact_as_eager(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, how = SHAPES[shape]
    model = layers(("batch norm", "largest", "group norm", "over channels"), how)
    x = torch.randn(size)
    fast = emulated(model, x, monkeypatch)
    batch = size[0] + 3 if size[0] > 1 else 1
    compare(fast, model, torch.randn(batch, *size[1:]), 1e-6)


@pytest.mark.sample(0)
def test_modules_train_as_in_eager_mode(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(("two", "bias", "instance norm", "layer norm", "softmax", "pooled"), {})
    x = torch.randn(2, 12, 5, 6)
    made = emulated_source(model, x, monkeypatch)
    fast = on_library(model, x, *made, TRAINED)
    # A bias before an instance norm has a gradient whose terms cancel.
    as_exact_as_eager(fast, model, x, least=8e-6)
    for first, second in zip(fast(x), fast(x), strict=True):
        assert torch.equal(first, second), "two runs, two results"
    torch.backends.cudnn.allow_tf32 = True  # whose tiles have twice the positions
    compare(on_library(model, x, *made, INFERRED), model, torch.randn(11, 12, 5, 6), 4e-3)
    assert asked


@pytest.mark.sample(3)
@pytest.mark.parametrize("width", [9, 10, 12])
def test_groups_of_channels_cross_warps(
    width: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 channels in groups of 20; one, two and four positions at a time, in either precision."""
    names = ("batch norm", "largest", "group norm", "over channels", "pooled")
    model = layers(names, {"results": 40})
    x = torch.randn(3, 12, 6, width)
    fast = emulated(model, x, monkeypatch)
    compare(fast, model, x, 1e-6)
    torch.backends.cudnn.allow_tf32 = True
    compare(fast, model, torch.randn(5, 12, 6, width), 4e-3)
    assert asked


@pytest.mark.parametrize("turned", [False, True])
def test_operands_of_a_reducing_epilogue(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes of which a thread reads two elements at once, and planes with strided columns."""

    def follows(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        beside = x[:, :8].transpose(2, 3) if turned else x[:, :8]
        y = m.conv(x) * beside  # type: ignore[operator]
        return y, y.sum((0, 2, 3)), y.amax((2, 3))

    torch.manual_seed(0)
    model, x = Layer(follows), torch.randn(3, 12, 10, 10)
    found = prepared(model, x)
    planes = [
        form.kernel.inner[-1].name == "plane"
        for kernel in convolutions_of(found.modes[0].inference)
        for form in convolution_forms(kernel)
        if form.is_row
    ]
    assert planes and set(planes) == {not turned}
    compare(emulated(model, x, monkeypatch), model, torch.randn(5, 12, 10, 10), 1e-6)


def test_infinity_and_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are Inf or NaN are computed again before they are reduced."""

    def follows(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = m.conv(x) * m.scale  # type: ignore[operator]
        return y, y.sum((2, 3)), y.amax((0, 2, 3)), y.amin(1), y.sum(1)

    torch.manual_seed(0)
    model = Layer(follows, results=20)
    x = torch.randn(6, 12, 6, 10)
    x[1, 3, 2, 4], x[2, 0, 0, 0], x[4, 5, 5, 9] = float("inf"), -float("inf"), float("nan")
    fast = emulated(model, x, monkeypatch)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        for mine, truth in zip(fast(x), exact, strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_staged_inputs(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, with a scale for each image. A tile has several images."""
    monkeypatch.setattr(tensor_core, "prefers_staging", lambda *_: True)
    model = layers(("batch norm", "group norm", "over channels"), {})
    fast = emulated(
        model, torch.randn(2, 12, 5, 6), monkeypatch, ("fw::ByStagedInput<", "fw::ByStagedInput<")
    )
    torch.backends.cudnn.allow_tf32 = True
    x = torch.randn(11, 12, 5, 6) * torch.exp2(torch.arange(11.0) * 3).view(-1, 1, 1, 1)
    compare(fast, model, x, 4e-3)
    assert asked


def test_residue_classes_that_read_one_plane(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged input of a transposed convolution, whose planes are longer than those of one class.
    Its workspace follows directly behind the partial results."""
    monkeypatch.setattr(tensor_core, "prefers_staging", lambda *_: True)
    how = {"transposed": True, "stride": 2, "kernel_size": 4}
    model = layers(("batch norm", "pooled"), how)
    x = torch.randn(40, 12, 7, 6)
    fast = emulated(model, x, monkeypatch, ("fw::ByStagedInput<", "fw::ByStagedInput<"))
    torch.backends.cudnn.allow_tf32 = True
    compare(fast, model, x, 4e-3)
    assert asked


class Around(nn.Module):
    """Operands of the epilogue: one per channel, per column, per row, and a full tensor."""

    def __init__(self, conv: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.conv = conv
        _, results, height, width = conv(x).shape
        sizes = ((results, 1, 1), (width,), (height, 1), (results, height, width))
        self.beside = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        scale, column, row, everything = self.beside
        z = torch.relu(y * scale) * column + row
        return z, z * everything + y.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("staged", [False, True])
def test_rows_by_eight_with_operators_around(
    staged: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two interleaved rows, with 4, 2 and 1 columns at a time, and few results."""
    monkeypatch.setattr(tensor_core, "prefers_staging", lambda *_: staged)
    torch.manual_seed(0)
    x = torch.randn(3, 12, 5, 8)
    convs = {
        "4x4": nn.ConvTranspose2d(12, 10, 4, 2, 1),
        "groups": nn.ConvTranspose2d(12, 12, (3, 5), 2, 1, groups=2),
        "odd columns": nn.ConvTranspose2d(12, 20, 3, 2, 1),
        "few results": nn.Conv2d(12, 24, 3, padding=1),
    }
    model = Layers({name: Around(conv, x) for name, conv in convs.items()})
    made = emulated_source(model, x, monkeypatch, reduces=False)
    as_exact_as_eager(on_library(model, x, *made, TRAINED), model, x, least=2e-6)
    torch.backends.cudnn.allow_tf32 = True
    compare(on_library(model, x, *made, INFERRED), model, torch.randn(5, 12, 5, 8), 4e-3)
    assert asked


def test_many_partial_results_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with large batches."""
    monkeypatch.setattr(convolution_text, "MOST_PARTIALS", 4)
    model = layers(("batch norm", "group norm"), {})
    x = torch.randn(5, 12, 6, 10)
    few = "kMostPartials = 4, kFoldedPartials = 3"
    fast = emulated(model, x, monkeypatch, ("kMostPartials = 2048, kFoldedPartials = 256", few))
    compare(fast, model, x, 1e-6)


def test_a_batch_of_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sums are zero: the entry still combines the partial results, though no tile wrote
    any."""

    def summed(m: nn.Module, x: Tensor) -> Tensor:
        return m.conv(x).sum((0, 2, 3))  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    found = prepared(Layer(summed), torch.randn(3, 12, 8, 8))
    (step,) = (each for each in found.modes[0].inference.steps if each.kind == "convolution")
    (entry,) = (each for each in found.source.entries if each.name == step.name)
    out, empty = torch.full((8,), 5.0), torch.empty(0, 12, 8, 8)
    weight, workspace = torch.randn(8, 12, 3, 3), torch.empty(entry.workspace.at({"s0": 0}))
    bias = torch.randn(8)  # which may be read although no sum has it
    given = dict.fromkeys(entry.arguments, ctypes.c_void_p(bias.data_ptr()))
    given[step.kernel.source.buffer] = ctypes.c_void_p(empty.data_ptr())
    given[step.kernel.filter.buffer] = ctypes.c_void_p(weight.data_ptr())
    given[step.outputs[-1]] = ctypes.c_void_p(out.data_ptr())
    images = ctypes.c_int64(0)
    where = [ctypes.c_void_p(workspace.data_ptr()), ctypes.c_int(0), ctypes.c_void_p(0)]
    source = Source("host", on_host(found.source.text), found.source.entries)
    library = host_library(of_kernels(source, {entry.name}).text)
    assert getattr(library, entry.name)(*given.values(), images, *where) == 0
    assert (out == 0).all()
