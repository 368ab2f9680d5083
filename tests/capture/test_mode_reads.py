"""Whether a forward asks for its mode. If it does not, one capture serves both modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.capture.mode_reads import watched_mode


class Doubling(nn.Dropout):
    """Asks for the mode itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


@pytest.mark.parametrize(
    ("layer", "asks"),
    [
        (nn.ReLU(), False),
        (nn.Dropout(0.0), False),
        (nn.Dropout1d(0), False),
        (nn.AlphaDropout(0.0), False),
        (nn.Dropout(0.5), True),
        (nn.Dropout(1.0), True),
        (Doubling(0.0), True),
        (nn.BatchNorm1d(4), True),
    ],
)
def test_only_layers_that_differ_ask(layer: nn.Module, asks: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    x = torch.randn(6, 4)
    with watched_mode(model) as reads:
        train = capture(model, (x,), mode="train")
    assert reads.seen == asks
    if not asks:
        other = capture(model, (x,), mode="eval")
        assert (train.forward, train.backward) == (other.forward, other.backward)
        assert train.inference == other.inference
