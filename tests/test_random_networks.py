"""Random networks on emulated kernels of an H200; `python -m tests.fuzz_networks` draws more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.fuzz_networks import failure, network_of, wrong


@pytest.mark.parametrize("all_on_tensor_cores", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_networks_train_and_evaluate_as_eager_does(seed: int, all_on_tensor_cores: bool) -> None:
    assert failure(seed, all_on_tensor_cores) == ""


class Scaled(nn.Module):
    """Wrong by one part in a thousand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = model.layers

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) * 1.001  # type: ignore[operator]
        return y


def test_a_wrong_network_is_noticed() -> None:
    model = network_of(0)
    x = model.inputs(2)
    assert not list(wrong(network_of(0), model, x))
    found = list(wrong(Scaled(network_of(0)), model, x))
    assert any("error" in each for each in found)
    with torch.no_grad():
        assert len(found) == len(list(model.parameters())) + 2
