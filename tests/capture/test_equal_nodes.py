"""Equal nodes of a joint graph become one, as PyTorch's partitioner does it, without Inductor."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.capture.equal_nodes import merged


def repeats(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.relu(x) + 1
    z = torch.relu(x) + 1.0
    return y.sum(0), (torch.relu(x) + 1).sum(0), z.sum(0), torch.clamp(x, 0, None), x.amax([0, 1])


def draws(x: Tensor) -> tuple[Tensor, ...]:
    return torch.rand_like(x) + torch.rand_like(x), torch.exp(x) * torch.exp(x)


def returns_twice(x: Tensor) -> tuple[Tensor, ...]:
    return torch.exp(x), torch.exp(x), torch.exp(x).view(-1)


def asks_for_sizes(x: Tensor) -> tuple[Tensor, ...]:
    return x / (x.shape[0] * 3), (x / (x.shape[0] * 3)).sum(), x.view(x.shape[0] * 4) + x.numel()


def changes_in_place(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    first = y.sum()
    y.add_(1)
    return first, y.sum()


@pytest.mark.parametrize(
    "function", [repeats, draws, returns_twice, asks_for_sizes, changes_in_place]
)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_the_copy_is_pytorchs_own(function: Any, mode: Any) -> None:
    traced = make_fx(function, tracing_mode=mode)(torch.randn(6, 4))
    ours, theirs = merged(traced.graph, plain=fx_graph_cse), fx_graph_cse(traced.graph)
    assert str(ours) == str(theirs)
    x = torch.randn(6, 4)
    if function is not draws:
        found, wanted = fx.GraphModule(traced, ours)(x), function(x)
        torch.testing.assert_close(tuple(found), tuple(wanted))


def test_zeros_of_both_signs_are_different() -> None:
    """PyTorch's own takes them for equal."""

    def function(x: Tensor) -> Tensor:
        return torch.copysign(x, 0.0) * 2 - torch.copysign(x, -0.0)

    traced, x = make_fx(function)(torch.randn(6)), torch.randn(6)
    found = fx.GraphModule(traced, merged(traced.graph, plain=fx_graph_cse))(x)
    torch.testing.assert_close(found, function(x))


CODE = """
import sys
import torch
from torch import nn
from fusewright.capture import capture

layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Softmax(1)
capture(nn.Sequential(*layers), (torch.randn(8, 4),), mode="train")
print([each for each in ("pattern_matcher", "ir") if f"torch._inductor.{each}" in sys.modules])
"""


def test_a_capture_does_not_load_inductors_templates() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
