"""16-bit values that forward and backward both compute have the same bits in both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusewright.compile.pipeline import prepare
from fusewright.schedule import held_columns
from fusewright.target.target import Target
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import as_exact_as_eager, on_library


class Largest(nn.Module):
    """Gradients go where a value equals the largest. Backward stores the values that it is computed
    from, and forward does not, which would leave forward more digits."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(each) + 0.5 for each in (5, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        few, many = (x[:, : len(each)] for each in self.weights)
        centred = few - few.mean(1, keepdim=True)
        first = centred * self.weights[0][:, None, None]
        moved = many - 0.3
        second = moved * torch.rsqrt(moved.square().mean(1, keepdim=True) + 0.1)
        second = second * self.weights[1][:, None, None]
        second = second - second.amax(1, keepdim=True)
        return (
            first + first.amax(1, keepdim=True),
            centred * 1.5,
            second + second.amax(1, keepdim=True),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_finds_the_largest_value_again(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_columns, "LEAST_COLUMNS", 1)
    torch.manual_seed(0)
    x, model = torch.randn(2, 64, 4, 8).to(dtype), Largest().to(dtype)
    device, target = torch.device("cpu"), Target.cuda()
    found = prepare(model, (x,), modes=("train",), device=device, target=target)
    fast = on_library(model, x, found, emulated(found.source))
    as_exact_as_eager(fast, model, x, 8e-2)
