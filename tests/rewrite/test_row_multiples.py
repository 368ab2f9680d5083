"""Sizes that a program knows in multiples: the same results, for the sizes that it fits."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.compile import planning
from fusewright.compile.pipeline import prepare
from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.ir.graph import Program
from fusewright.rewrite import rewrite
from fusewright.rewrite.row_multiples import with_row_multiples
from fusewright.target.target import Target
from tests.support.emitted_files import executed
from tests.support.plans import called_operators

SOURCE = '''
import torch
from torch import nn


class Model(nn.Module):
    """Two dynamic sizes, both in the shape of the product; a mean over all, and a size itself."""

    def forward(self, a, b):
        y = torch.relu(a @ b.t())
        return y.softmax(1) + y.mean(), y.t().contiguous(), b.shape[0] * 2
'''


def model_class() -> type[nn.Module]:
    kind: type[nn.Module] = executed(SOURCE)["Model"]
    return kind


def inputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 12), torch.randn(columns, 12)


def results(model: nn.Module, given: tuple[Tensor, Tensor]) -> list[Any]:
    leaves = [each.clone().requires_grad_() for each in given]
    y, turned, count = model(*leaves)
    (y.square().sum() + turned.cumsum(0).square().mean()).backward()
    with torch.no_grad():
        again = model(*leaves)
    return [y.detach(), turned.detach(), count, *(each.grad for each in leaves), *again]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, too, where it changes no matmul."""
    monkeypatch.setattr(planning, "rewrite", lambda program: with_row_multiples(rewrite(program)))


def programs() -> tuple[Program, Program]:
    program = rewrite(capture(model_class()(), inputs(6, 32), mode="train"))
    return program, with_row_multiples(program)


def test_the_batch_stays_and_rows_become_multiples() -> None:
    before, after = programs()
    assert [(each.example, each.multiple) for each in before.symbols] == [(6, 1), (32, 1)]
    assert [(each.example, each.multiple) for each in after.symbols] == [(6, 1), (4, 8)]
    name = after.symbols[1].name
    shapes = {str(node.spec) for node in after.forward.nodes if "aten.mm" in node.op}
    assert shapes == {f"float32[{after.symbols[0].name}, 8*{name}]"}
    assert with_row_multiples(after) is after


@pytest.mark.parametrize("columns", [30, 0])
def test_a_size_that_is_no_multiple_stays(columns: int) -> None:
    if columns == 0:
        program = rewrite(capture(nn.Linear(8, 8), (torch.randn(16, 8),), mode="train"))
    else:
        program = rewrite(capture(model_class()(), inputs(6, columns), mode="train"))
    assert with_row_multiples(program) is program


def test_results_at_sizes_that_fit_and_at_others(always: None) -> None:
    plain = model_class()()
    fast = fusewright.optimize(copy.deepcopy(plain), inputs(6, 32), modes=("train",))
    assert fast.__dict__["_fw_engine"].modes[0].symbols[1][2] == 8
    for rows, columns in ((6, 32), (3, 40), (6, 8), (5, 33), (4, 30), (6, 32)):
        given = inputs(rows, columns)
        for mine, theirs in zip(results(fast, given), results(plain, given), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_an_emitted_file(always: None) -> None:
    made = solve(model_class()(), inputs(6, 32), name="multiples")
    names = executed(file_text(made.bundle, SOURCE, ""))
    fast, plain = names["ModelNew"](), names["Model"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows, columns in ((6, 32), (9, 16)):
            given = inputs(rows, columns)
            for mine, theirs in zip(results(fast, given), results(plain, given), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with pytest.warns(RuntimeWarning, match=r"argument 1 has shape \(31, 12\)"):
        fast(*inputs(6, 31))


class Turned(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b.t()


def test_gradients_of_a_matmul_with_two_dynamic_sizes_are_ours() -> None:
    given = (torch.randn(1024, 2048), torch.randn(2048, 2048))
    for rows, ours in ((2048, True), (2047, False)):
        pair = (given[0], given[1][:rows].contiguous())
        made = prepare(
            Turned(), pair, modes=("train",), device=given[0].device, target=Target.cuda()
        )
        assert (called_operators(made.modes[0].backward) == []) == ours
