"""Modules with convolutions over three axes: what is planned, and the kernels by emulation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen.source import Source
from fusewright.compile.pipeline import prepare
from fusewright.ir.convolution import SINGLE, ConvAxis
from fusewright.ir.epilogue import Reduces
from fusewright.runtime import tensor_cores
from tests.support.emulated_modules import as_exact_as_eager, on_library, trained, use_tensor_cores
from tests.support.plans import CUDA, prepared_for_training, steps_of
from tests.support.tensor_cores_on_host import on_host, with_stand_in


class Growing(nn.Module):
    """Strided and transposed; operands are a full tensor, a value per channel and one per plane."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(6, 10, 3, padding=1)
        self.down = nn.Conv3d(10, 12, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(12, 9, 4, stride=2, padding=1)
        self.scale = nn.Parameter(torch.randn(9, 1, 1, 1))
        self.planes = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)) * self.planes
        return torch.tanh(self.up(torch.sigmoid(self.down(y)))) * self.scale + x.sum(
            1, keepdim=True
        )


class Pooled(nn.Module):
    """Results that are only reduced are not written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(6, 40, 3)
        self.down = nn.Conv3d(6, 36, 3, padding=1)
        self.wide = nn.ConvTranspose3d(6, 40, 3, stride=(2, 1, 1), padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        over_space = torch.relu(self.conv(x)).mean((2, 3, 4))
        return over_space, self.down(x).amax(1), torch.sigmoid(self.wide(x)).sum((2, 3, 4))


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tensor_cores(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]


def test_every_pass_of_a_volume_is_our_kernel() -> None:
    mode = prepared_for_training(Growing(), torch.randn(2, 6, 4, 6, 8)).modes[0]
    forward, backward = mode.forward, mode.backward
    assert len(steps_of(forward, "convolution")) == 3 and not steps_of(forward, "call")
    assert len(steps_of(backward, "convolution")) == 3 and not steps_of(backward, "call")
    assert len(steps_of(backward, "weight_gradient")) == 3
    first, down, up = (step.kernel.geometry for step in steps_of(forward, "convolution"))  # type: ignore[attr-defined]
    assert first.z == ConvAxis(4, 4, 3, 1, 1, 1) and first.taps == 27
    assert first.phases == (9, 9, 9) and first.planes == 1 and first.pixels == 192
    assert down.phases == (4, 2, 2, 1) * 3 and down.planes == 8
    assert up.residue_classes == ((4, 4),) * 8 and up.planes == 1 and up.transposed
    assert first.axes[0].is_single is False and SINGLE.is_single


def test_reduced_results_are_not_written() -> None:
    mode = prepare(
        Pooled(), (torch.randn(2, 6, 4, 6, 8),), modes=("eval",), device=None, target=CUDA
    ).modes[0]
    made = steps_of(mode.inference, "convolution")
    assert {step.kernel.reduces for step in made} == {Reduces.ACROSS, Reduces.DOWN}  # type: ignore[attr-defined]
    specs = dict(mode.inference.specs)
    elements = {name: specs[name].numel for step in made for name in step.outputs}  # type: ignore[attr-defined]
    assert max(each.factor for each in elements.values()) <= 2 * 4 * 6 * 8, elements


# One plane along z, with a plane of padding before it, or with results that have no terms.
FLAT: dict[str, nn.Module] = {
    "strided": nn.Conv3d(6, 8, (1, 3, 3), stride=2, padding=(0, 1, 1)),
    "grown": nn.ConvTranspose3d(6, 8, (1, 3, 3), stride=(2, 1, 1), padding=(0, 1, 1)),
    "beside": nn.Conv3d(6, 8, (1, 3, 3), stride=(3, 1, 1), padding=1),
    "between": nn.ConvTranspose3d(
        6, 8, (1, 3, 3), stride=(3, 1, 1), padding=1, output_padding=(2, 0, 0)
    ),
}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", FLAT)
def test_a_single_plane_with_strides_or_padding_along_z(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    torch.manual_seed(0)
    model, x = nn.Sequential(FLAT[name], nn.Tanh()), torch.randn(2, 6, 1, 6, 8)
    found = prepared_for_training(model, x)
    assert "#define FW_VOLUMES 0" not in found.source.text
    source = Source("host", on_host(found.source.text), found.source.entries)
    fast, exactly = on_library(model, x, found, source), copy.deepcopy(model).double()
    for ours, truth in zip(trained(fast, x), trained(exactly, x.double()), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("kind", [Growing, Pooled])
def test_modules_train_on_emulated_kernels(
    kind: str[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 6, 4, 6, 8)
    found = prepared_for_training(model, x)
    source = Source("host", on_host(found.source.text), found.source.entries)
    as_exact_as_eager(on_library(model, x, found, source), model, x, 2e-6)
