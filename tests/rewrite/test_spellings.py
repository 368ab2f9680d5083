"""Spellings of the same thing give the same plan, on a CPU and on a GPU, forward and backward.

Where two spellings differ in a special value (a tie, an overflow, a NaN) or in rounding, their
graphs stay apart. Then their plans have the same structure: as many kernels, and the same calls.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusewright.capture import capture
from fusewright.ir.graph import Program
from fusewright.ir.interpret import interpret
from fusewright.rewrite import rewrite
from fusewright.target.target import Target
from tests.support import matmul_spellings as matmul
from tests.support import pointwise_spellings as pointwise
from tests.support import reduction_spellings as reduction
from tests.support.on_gpu import captured_for_gpu, on_gpu
from tests.support.plan_content import PARTS, contents, planned, structure
from tests.support.spelling import Pair, Run, Spelling

TABLES = (
    *(pointwise.CONSTANTS, pointwise.COUNTED, pointwise.ACTIVATIONS, pointwise.ARITHMETIC),
    *(reduction.REDUCTIONS, reduction.SOFTMAXES, reduction.NORMS, reduction.LOSSES),
    *(matmul.MATMULS, matmul.VIEWS),
)
PAIRS = [pair for table in TABLES for pair in table.pairs]


def captured(run: Run, pair: Pair) -> Program:
    model = Spelling(run, pair.held())
    return capture(model, [torch.empty(shape) for shape in pair.shapes], mode="train")


def programs(pair: Pair, device: str) -> list[Program]:
    if device == "host":
        return [captured(run, pair) for run in (pair.first, pair.second)]
    with captured_for_gpu():
        return [on_gpu(captured(run, pair)) for run in (pair.first, pair.second)]


def name_of(pair: Pair) -> str:
    return pair.name


@pytest.mark.sample(3)
@pytest.mark.parametrize("device", ["host", "cuda"])
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_both_spellings_have_one_plan(pair: Pair, device: str) -> None:
    if device == "host" and pair.name in ("max", "min"):
        pytest.skip("PyTorch's max with its index is faster than a loop on a CPU")
    target = Target.host() if device == "host" else Target.cuda()
    first, second = (planned(each, target) for each in programs(pair, device))
    for part, plan in first[1].items():
        # Gradients lie as the results do, so backward's loops are others.
        if part != "backward" or pair.why != "their results have different strides":
            assert structure(plan) == structure(second[1][part]), part
    ours, theirs = contents(*first), contents(*second)
    assert not bool(pair.why) or pair.same != PARTS
    for part in pair.same:
        assert ours.get(part) == theirs.get(part), part


SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 0.5, 1.0, -1.0, 6.0, 3.0, -3.0, 1e-40, 3e38)


def arguments(pair: Pair, special: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(shape, generator=generator) * 2 - 0.5 for shape in pair.shapes]
    for x in made if special else ():
        count = min(len(SPECIAL), x.numel())
        order = torch.randperm(len(SPECIAL), generator=generator)[:count]
        x.view(-1)[:count] = torch.tensor(SPECIAL)[order]
    return made


def results(program: Program, pair: Pair, special: bool) -> list[Tensor | None]:
    """Outputs and gradients; in float32 for special values, in float64 for others."""
    args, sizes = arguments(pair, special), program.example_sizes
    state = dict(Spelling(pair.first, pair.held()).state_dict())
    given = [
        args[int(each.path)] if each.kind == "input" else state[each.path]
        for each in program.bindings
    ]
    made = interpret(program.forward, given, sizes, exact=special)
    first = sum(result.kind != "saved" for result in program.results)
    if program.backward is None:
        return list(made[:first])
    generator = torch.Generator().manual_seed(2)
    tangents = [torch.randn(made[at].shape, generator=generator) for at in program.tangents]
    gradients = interpret(program.backward, [*made[first:], *tangents], sizes, exact=special)
    return [*made[:first], *gradients]


@pytest.mark.sample(3)
@pytest.mark.parametrize("pair", [each for each in PAIRS if "large" not in each.name], ids=name_of)
def test_rewriting_keeps_special_values(pair: Pair) -> None:
    """NaN, infinities and signs of zeros stay as they were captured; other values within the
    rounding of a float32 constant."""
    for run in (pair.first, pair.second):
        before = captured(run, pair)
        after = rewrite(before)
        for special in (False, True):
            old, new = (results(each, pair, special) for each in (before, after))
            for mine, theirs in zip(new, old, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None and theirs is not None:
                    same_values(mine, theirs, 1e-3 if special else 3e-7, pair)


def same_values(mine: Tensor, theirs: Tensor, within: float, pair: Pair) -> None:
    torch.testing.assert_close(mine, theirs, rtol=within, atol=within, equal_nan=True)
    zeros = (mine == 0) & (theirs == 0)
    # A matmul adds to zero, so that -0 becomes 0, and the order of two zeros decides a maximum.
    if pair not in matmul.MATMULS.pairs and "einsum" not in pair.name and "max" not in pair.name:
        assert torch.equal(mine[zeros].signbit(), theirs[zeros].signbit())


def test_there_are_enough_pairs() -> None:
    assert len(PAIRS) == len({pair.name for pair in PAIRS}) >= 150
    assert sum(pair.same == PARTS for pair in PAIRS) >= 100
