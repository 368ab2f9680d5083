"""Corners beside eager mode, many of them as one model."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

import fusewright
from fusewright.capture.unguarded import Trust
from fusewright.compile import solution
from fusewright.compile.engine import engine_of
from tests.opdb.compare import differences
from tests.opdb.corners import Corner, corners
from tests.opdb.models import tensors_of
from tests.opdb.runs import in_float64, run

PER_MODEL = 30


class Many(nn.Module):
    """All corners at once."""

    def __init__(self, held: Sequence[Corner]) -> None:
        super().__init__()
        self.calls = [(each.function, len(each.inputs)) for each in held]

    def forward(self, *tensors: Tensor) -> Any:
        made, at = [], 0
        for function, count in self.calls:
            made.append(function(*tensors[at : at + count]))
            at += count
        return made


@functools.cache
def models() -> dict[str, list[Corner]]:
    """What eager mode takes of each group, in parts."""
    found = {}
    for group, held in corners().items():
        taken = [each for each in held if not run(Many([each]), each.inputs).failed]
        assert len(taken) > len(held) // 3, group
        for at in range(0, len(taken), PER_MODEL):
            found[f"{group}, {at // PER_MODEL}"] = taken[at : at + PER_MODEL]
    return found


NAMES = [
    f"{group}, {part}"
    for group, held in corners().items()
    for part in range(-(-len(held) // PER_MODEL))
]


def _named(words: str, held: Sequence[Corner]) -> str:
    """The corner that a difference is about, in front of its words."""
    outputs = [
        each.name for each in held for _ in tensors_of(run(Many([each]), each.inputs).outputs)
    ]
    inputs = [each.name for each in held for _ in each.inputs]
    what, _, at = words.partition(":")[0].rpartition(" ")
    return f"{(outputs if what.startswith('output') else inputs)[int(at)]}: {words}"


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_corners(name: str) -> None:
    held = models().get(name)
    if not held:
        pytest.skip("eager mode takes fewer of them")
    model, inputs = Many(held), [x for each in held for x in each.inputs]
    eager, truth = run(copy.deepcopy(model), inputs), in_float64(model, inputs, "train")
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("error", RuntimeWarning)  # no original forward
        # The functions that forward reads stay what they are.
        stack.enter_context(mock.patch.object(solution, "trust_of", lambda *_: Trust()))
        fast = fusewright.optimize(copy.deepcopy(model), inputs, modes=("train",))
    engine = engine_of(fast)
    assert engine is not None and not engine.reason, engine.reason
    found = [differences(run(fast, inputs), eager, truth)]
    plain = run(model, inputs, gradients=False)
    found.append(differences(run(fast, inputs, gradients=False), plain, truth))
    assert not engine.record.fallbacks()
    assert [_named(words, held) for each in found for words in each] == []
