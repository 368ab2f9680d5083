"""A hidden state that begins on the CPU while the model is on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusewright

WIDTH, BATCH = 32, 16


class Moving(nn.Module):
    """The state lies on the CPU before the first call and on the GPU afterwards."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.hidden = torch.randn(BATCH, WIDTH)
        self.inner, self.outer = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        if self.writes:
            self.hidden.copy_(start)
        self.hidden = self.hidden.to(x.device)
        self.hidden = torch.tanh(self.inner(torch.cat([x, self.hidden], 1)))
        y: Tensor = self.outer(self.hidden)
        return y


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_state_that_begins_on_the_cpu(writes: bool, training: bool) -> None:
    torch.manual_seed(0)
    x, start = torch.randn(2, BATCH, WIDTH, device="cuda")
    model = Moving(writes).cuda().train(training)
    models = [model, fusewright.optimize(copy.deepcopy(model), (x, start)).train(training)]
    found = []
    for each in models:
        given = [x.clone().requires_grad_(), start.clone().requires_grad_()]
        y = each(*given)
        y.square().mean().backward()
        gradients = [leaf.grad for leaf in (*given, *each.parameters())]
        hidden = each.hidden
        assert isinstance(hidden, Tensor) and hidden.device.type == "cuda"
        with torch.no_grad():
            found.append([y, hidden, *gradients, each(*given), each.hidden])
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert (mine is None) == (theirs is None)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
