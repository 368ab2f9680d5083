"""Convolutions over three axes on the tensor cores of a GPU: shapes, precisions, gradients,
edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusewright.compile.pipeline import prepare
from fusewright.schedule import tensor_core
from tests.support.gpu import eager_and_exact, needs_hopper, optimized_copy, trained_on_gpu
from tests.support.tensors import error

pytestmark = [needs_hopper, pytest.mark.usefixtures("every_convolution")]


VOLUMES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3x3x3": (nn.Conv3d(64, 96, 3, padding=1), (2, 64, 9, 20, 24)),
    "few channels": (nn.Conv3d(3, 16, 3), (4, 3, 12, 30, 31)),
    "stride 2": (nn.Conv3d(32, 64, 3, stride=2, padding=1), (2, 32, 17, 28, 30)),
    "oblong": (
        nn.Conv3d(24, 40, (5, 1, 3), padding=(2, 0, 1), dilation=(1, 1, 2)), (2, 24, 9, 14, 33)
    ),
    "groups": (nn.Conv3d(64, 64, (2, 3, 3), groups=2, stride=(1, 2, 1)), (3, 64, 7, 19, 20)),
    "1x1x1": (nn.Conv3d(70, 130, 1), (3, 70, 5, 14, 15)),
    "transposed, stride 2": (
        nn.ConvTranspose3d(48, 32, 3, stride=2, padding=1, output_padding=1), (2, 48, 8, 14, 15)
    ),
    "transposed 4x4x4": (nn.ConvTranspose3d(64, 40, 4, stride=2, padding=1), (2, 64, 6, 10, 12)),
    "transposed 2x2x2": (nn.ConvTranspose3d(64, 70, 2, stride=2), (2, 64, 6, 10, 12)),
    "transposed, stride 1": (nn.ConvTranspose3d(40, 64, 3, padding=1), (2, 40, 8, 14, 16)),
    "transposed, strides differ": (
        nn.ConvTranspose3d(40, 24, (3, 4, 3), stride=(2, 1, 1), padding=1), (2, 40, 7, 14, 16)
    ),
}  # fmt: skip


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    layer, shape = VOLUMES[name]
    torch.manual_seed(len(name))
    return nn.Sequential(layer, nn.SiLU()).cuda(), torch.randn(shape, device="cuda")


@pytest.mark.parametrize(("tf32", "staged"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_are_as_exact_as_eager(
    name: str, tf32: bool, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    monkeypatch.setattr(tensor_core, "prefers_staging", lambda *_: staged)
    model, x = model_of(name)
    fast = optimized_copy(model, x)
    text = prepare(model, (x,), device=x.device).source.text
    assert "fw::convolution<" in text and ("ByStagedInput<" in text) == staged
    mine, again = trained_on_gpu(fast, x), trained_on_gpu(fast, x)
    for y, same, e, d in zip(mine, again, *eager_and_exact(model, x), strict=True):
        assert torch.equal(y, same), "two runs, two results"
        assert error(y, d) <= max(1.1 * error(e, d), 4e-7)


@pytest.mark.parametrize("tf32", [False, True])
def test_infinity_and_nan_are_where_eager_has_them(tf32: bool) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    model = nn.Conv3d(32, 48, 3, padding=1).cuda()
    x = torch.randn(2, 32, 6, 12, 14, device="cuda")
    x[0, 3, 2, 5, 5], x[1, 30, 0, 0, 13], x[1, 1, 5, 11, 0] = (
        float("inf"),
        -float("inf"),
        float("nan"),
    )
    with torch.no_grad():
        eager, y = model(x), optimized_copy(model, x)(x)
    assert torch.equal(y.isnan(), eager.isnan()) and torch.equal(y.isinf(), eager.isinf())
    assert torch.equal(y[y.isinf()], eager[eager.isinf()])


def test_reduced_volumes_are_as_exact_as_eager() -> None:
    torch.backends.cudnn.allow_tf32 = True

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv3d(32, 64, 3), nn.ConvTranspose3d(32, 40, 3)

        def forward(self, x: Tensor) -> Tensor:
            means = torch.relu(self.first(x)).mean((2, 3, 4))
            return means.sum() * self.second(x).amax(1)

    model, x = Pooled().cuda(), torch.randn(3, 32, 8, 16, 18, device="cuda")
    for y, e, d in zip(
        trained_on_gpu(optimized_copy(model, x), x), *eager_and_exact(model, x), strict=True
    ):
        assert error(y, d) <= max(2 * error(e, d), 1e-6)
