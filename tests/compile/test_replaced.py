"""Functions of PyTorch that a program replaces by its own after `optimize`: eager is the truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.activation(self.layer(x))) * torch.sigmoid(x)


def _tripled(x: Tensor, **_: Any) -> Tensor:
    return x * 3


@pytest.mark.parametrize(
    ("owner", "name", "new"),
    [
        (F, "gelu", _tripled),
        (F, "relu", _tripled),  # called by a layer of PyTorch
        (torch, "sigmoid", _tripled),
        (nn.Linear, "forward", lambda self, x: x * self.weight[0] * 3),
    ],
)
def test_a_function_of_pytorch_is_replaced(
    owner: Any, name: str, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Model(), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))
    before = fast(x)
    with monkeypatch.context() as replaced:
        replaced.setattr(owner, name, new)
        wanted = model(x)
        assert not torch.allclose(wanted, before)
        torch.testing.assert_close(fast(x), wanted)
    torch.testing.assert_close(fast(x), before)
