"""The model in float64: one copy of it answers any number of questions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from fusewright.problem.nested import map_leaves
from fusewright.verify.attributes import widen_attributes
from fusewright.verify.feeds import Feed
from fusewright.verify.float64 import doubled, widened
from fusewright.verify.precision import (
    DIGITS,
    LastDigits,
    RoundOperands,
    RoundResults,
    rounded,
)
from fusewright.verify.run import Subject, ask
from fusewright.verify.scenarios import PLAIN_LAYOUT, Question, Results

# Transposed and sliced gradients have the values of the contiguous one, so only these two layouts
# need a float64 run.
VALUE_LAYOUTS = ("contiguous", "expanded")


def value_layout(layout: str) -> str:
    """The layout whose values this one has."""
    return layout if layout in VALUE_LAYOUTS else PLAIN_LAYOUT[0]


Change = Callable[[object], object]


class WideModel:
    """A float64 copy of a model.

    With `digits`, the operands of its matmuls are rounded. With a seed as `rounding`, each result
    of an operator is off by a float's last digit. `change` alters parameters, inputs and tangents
    before they are converted.
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: bool,
        *,
        digits: int | None = None,
        rounding: int | None = None,
        change: Change | None = None,
    ) -> None:
        self.model, self.gradients = copy.deepcopy(model).double(), gradients
        self.digits, self.change = digits, change or (lambda leaf: leaf)
        self.rounding = rounding
        if change is not None:
            for mine, each in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.data = _tensor(widened(change(each.data)))
        widen_attributes(self.model, widened)
        # 16-bit kernels also convert their inputs, parameters and results.
        self.narrow_inputs = digits == DIGITS["bf16"]
        if self.narrow_inputs:
            for each in self.model.parameters():
                each.data = rounded(each.data, digits or 0)

    def ask(self, question: Question, layouts: Sequence[str]) -> dict[str, Results]:
        """The results for every layout."""
        inputs = tuple(map_leaves(self._input, each) for each in question.inputs)
        tangents = {name: _tensor(self._input(each)) for name, each in question.tangents.items()}
        subject = Subject(self.model, Feed((inputs,), seed=0, gradients=self.gradients))
        state = {name: map_leaves(widened, each) for name, each in question.attributes.items()}
        wide = replace(question, inputs=inputs, tangents=tangents, blocks=(), attributes=state)
        values = {value_layout(each): None for each in layouts}
        with doubled(), self._mode():
            found = ask(subject, wide, tuple(values)).results
        return {each: self._stored(found[value_layout(each)]) for each in layouts}

    def _stored(self, results: Results) -> Results:
        if not self.narrow_inputs:
            return results
        digits, written = self.digits or 0, ("output", "grad ")
        return {n: rounded(e, digits) if n.startswith(written) else e for n, e in results.items()}

    def _mode(self) -> AbstractContextManager[object]:
        if self.rounding is not None:
            return RoundResults(self.rounding)
        return RoundOperands(self.digits) if self.digits else nullcontext()

    def _input(self, leaf: object) -> object:
        wide = widened(self.change(leaf))
        return rounded(wide, self.digits or 0) if self.narrow_inputs else wide


def last_digit_changed(seed: int) -> Change:
    """Changes each floating number by at most one unit in its last place."""
    digits = LastDigits(seed)

    def changed(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().double() * digits.factors(leaf, torch.finfo(leaf.dtype).eps)

    return changed


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value
