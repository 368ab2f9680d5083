"""Dropout in float64 with eager's own mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusewright.verify.feeds import Feed
from fusewright.verify.reference import Reference
from fusewright.verify.replay import Draws, ReplayError, replayed
from fusewright.verify.scenarios import PLAIN_LAYOUT, Scenario


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        noisy = self.linear(x) + 0.1 * torch.randn_like(x)
        return torch.nn.functional.dropout(noisy, 0.4, self.training) * torch.rand(16)


def test_the_truth_has_eagers_mask() -> None:
    torch.manual_seed(0)
    feed = Feed(((torch.randn(32, 16),),), seed=1)
    reference = Reference(Dropping(), feed, 1, "train")
    plain = reference.expect(Scenario(gradients=True), feed.values(0))
    assert plain is not None and not plain.truth and "random model" in plain.why
    expected = replayed(reference, plain)
    layout = PLAIN_LAYOUT[0]
    assert expected.truth and not expected.why
    for name in ("output", "grad x0", "grad linear.weight"):
        if name not in expected.truth[layout]:
            continue
        truth, eager = expected.truth[layout][name], expected.eager[layout][name]
        assert isinstance(truth, Tensor) and isinstance(eager, Tensor)
        assert truth.dtype == torch.float64
        error = float((truth - eager).norm() / truth.norm())
        assert 0 < error < 1e-6, name
    output = expected.truth[layout]["output"]
    assert isinstance(output, Tensor) and 0.2 < float((output == 0).double().mean()) < 0.6
    assert torch.equal(plain.eager[layout]["output"], expected.eager[layout]["output"])  # type: ignore[arg-type]


def test_other_draws_are_refused() -> None:
    draws = Draws()
    with draws:
        torch.rand(3)
    with pytest.raises(ReplayError, match="draws aten"), draws.replaying():
        torch.randn(3)
    with pytest.raises(ReplayError, match="fewer"), draws.replaying():
        torch.zeros(3)


def test_attention_draws_for_dropout_alone() -> None:
    """Its kernels on a GPU return numbers beside tensors, which nobody can hand out again."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    q = torch.randn(1, 2, 4, 8, device="meta", dtype=torch.float16)
    with Draws():
        attention(q, q, q, 0.0)
    with pytest.raises(ReplayError, match="cannot be replayed"), Draws():
        attention(q, q, q, 0.5)
