"""Linear layers whose result is reduced in the matmul's epilogue, and their kernels on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen.source import Source
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.ir.epilogue import Reduces
from fusewright.runtime import tensor_cores
from fusewright.target.target import Target
from tests.support.emulated_modules import TRAINED, on_library
from tests.support.plans import steps_of
from tests.support.tensor_cores_on_host import on_host, with_stand_in

Forward = Callable[[nn.Module, Tensor], object]


class Layer(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, forward: Forward, columns: int, contracted: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(contracted, columns, bias=bias)
        self.norm = nn.BatchNorm1d(columns)
        self.scale = nn.Parameter(torch.rand(columns) + 0.5)
        self.follows = forward

    def forward(self, x: Tensor) -> object:
        return self.follows(self, x)


def normed(m: nn.Module, x: Tensor) -> Tensor:
    return F.silu(m.norm(m.linear(x)))  # type: ignore[operator]


def row_sums(m: nn.Module, x: Tensor) -> Tensor:
    return (torch.relu(m.linear(x)) * m.scale).sum(-1)  # type: ignore[operator]


def row_squares(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.linear(x)  # type: ignore[operator]
    return (y * y).mean(-1), y.amax(-1).detach()


def one_best(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Backward looks for the value that equals the largest, and must find it, in 16 bits too."""
    y = m.linear(x)  # type: ignore[operator]
    return F.gelu(y).amax(0), y


def row_logsumexp(m: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(m.linear(x)).logsumexp(-1, keepdim=True) * 2  # type: ignore[operator]


def column_logsumexp(m: nn.Module, x: Tensor) -> Tensor:
    return (m.linear(x) * m.scale).logsumexp(0)  # type: ignore[operator]


def column_means(m: nn.Module, x: Tensor) -> Tensor:
    return m.linear(x).mean(0) * m.scale  # type: ignore[operator]


def column_sums(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(m.linear(x))  # type: ignore[operator]
    return y.sum((0, 1)) if y.dim() == 3 else y.sum(0), y


CASES: dict[str, tuple[Forward, Reduces]] = {
    "batch norm": (normed, Reduces.DOWN),
    "row sums": (row_sums, Reduces.ACROSS),
    "row squares": (row_squares, Reduces.ACROSS),
    "one best": (one_best, Reduces.DOWN),
    "row logsumexp": (row_logsumexp, Reduces.ACROSS),
    "column logsumexp": (column_logsumexp, Reduces.DOWN),
    "column means": (column_means, Reduces.DOWN),
    "column sums": (column_sums, Reduces.DOWN),
}


def prepared(model: nn.Module, *inputs: Tensor) -> Prepared:
    target = Target.cuda(trials=("half_matmuls", "fused_reductions"))
    device = inputs[0].device
    return prepare(model, inputs, modes=("train",), device=device, target=target)


def emulated(
    model: nn.Module,
    inputs: Sequence[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    plans: Sequence[str] = TRAINED,
) -> tuple[nn.Module, Source]:
    """The module on its kernels, run by fibers, and their text."""
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    found = prepared(model, *inputs)
    reducing = [each.kernel.reduces for each in steps_of(found.modes[0].forward, "matmul")]
    assert len(reducing) - reducing.count(Reduces.NOTHING) >= len(inputs)
    source = Source("host", on_host(found.source.text), found.source.entries)
    return on_library(model, inputs, found, source, plans), source
