"""The rows of a batch: parts of a call, and whether its rows depend on each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusewright.problem.inputs import is_differentiable, named_tensors
from fusewright.problem.nested import map_leaves
from fusewright.verify.feeds import Inputs
from fusewright.verify.figures import chunks, same_values
from fusewright.verify.scenarios import PLAIN_LAYOUT, Question, Results
from fusewright.verify.wide import WideModel

# Equal rows in two calls of the same sizes have the same float64 results, but for rounding.
_SAME = 1e-9
_TRIED_ROWS = 4
_SHRINK = 0.75
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Batch:
    """The arguments that have an entry for each of `rows` rows."""

    rows: int
    names: frozenset[str]

    def map(self, change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
        """The inputs with `change` applied to those that have rows."""
        mine = {id(each) for name, each in named_tensors(inputs) if name in self.names}

        def changed(leaf: object) -> object:
            return change(leaf) if isinstance(leaf, Tensor) and id(leaf) in mine else leaf

        return tuple(map_leaves(changed, each) for each in inputs)

    def part(self, inputs: Inputs, index: slice | Tensor) -> Inputs:
        """The inputs with these rows only; a slice copies nothing."""
        return self.map(lambda each: _taken(each, index), inputs)

    def question(self, question: Question, index: slice | Tensor) -> Question:
        """The question about these rows only."""
        return replace(
            question,
            inputs=self.part(question.inputs, index),
            tangents={
                name: _taken(each, index) if self.has_rows(name, each) else each
                for name, each in question.tangents.items()
            },
            blocks=(),
        )

    def has_rows(self, name: str, value: object) -> bool:
        """Whether this result has an entry for each row."""
        kind, _, of = name.partition(" ")
        rowless = kind == "buffer" or (kind in ("grad", "input") and of not in self.names)
        long = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.rows
        return long and not rowless


def possible_batches(inputs: Inputs) -> Iterator[Batch]:
    """What the batch may be: all arguments with the first one's rows, or the first one alone."""
    sizes = {name: each.shape[0] for name, each in named_tensors(inputs) if each.dim()}
    first = next(iter(sizes), None)
    if first is None or sizes[first] < 2:
        return
    alike = frozenset(name for name, size in sizes.items() if size == sizes[first])
    for names in dict.fromkeys((alike, frozenset({first}))):
        yield Batch(sizes[first], names)


def sample_rows(rows: int, count: int, seed: int) -> Tensor:
    """So many different rows in order: the first, the last and random ones."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randperm(max(rows - 2, 0), generator=generator)[: max(count - 2, 0)] + 1
    ends = torch.tensor([0, rows - 1][:count])
    return torch.cat([ends, inner]).sort().values


def worst_rows(found: Results, eager: Results, batch: Batch) -> set[int]:
    """For each result with rows, the row that differs most from eager's."""
    worst: set[int] = set()
    for name, theirs in eager.items():
        mine = found.get(name)
        if not isinstance(theirs, Tensor) or not isinstance(mine, Tensor):
            continue
        if (
            batch.has_rows(name, theirs)
            and mine.shape == theirs.shape
            and is_differentiable(theirs)
        ):
            worst.add(_worst_row(mine, theirs))
    return worst


def _worst_row(mine: Tensor, theirs: Tensor) -> int:
    largest, row = -1.0, 0
    for index in chunks(theirs.shape, _CHUNK):
        off = (mine[index] - theirs[index]).abs().flatten(1).amax(1)
        here = float(off.max())
        if here > largest or math.isnan(here):
            start = (index[0].start or 0) if index else 0
            largest, row = here, start + int(off.argmax())
    return row


def are_independent(wide: WideModel, question: Question, batch: Batch) -> bool:
    """Whether each row of the results depends on its own row of the inputs only.

    Two float64 calls have the same first rows and other rows after them. What they return for the
    first rows must be equal.
    """
    count = min(_TRIED_ROWS, batch.rows // 2)
    first, last = torch.arange(2 * count), torch.arange(2 * count)
    last[count:] += batch.rows - 2 * count
    results = [
        wide.ask(_about(question, batch, rows, count, factor), PLAIN_LAYOUT)[PLAIN_LAYOUT[0]]
        for rows, factor in ((first, 1.0), (last, _SHRINK))
    ]
    tried = Batch(2 * count, batch.names)
    return all(
        _is_equal(name, value, results[1].get(name), question.buffers, tried, count)
        for name, value in results[0].items()
    )


def _about(question: Question, batch: Batch, rows: Tensor, count: int, factor: float) -> Question:
    """A question about these rows; the values after the first `count` are scaled."""

    def scaled(each: Tensor) -> Tensor:
        if not is_differentiable(each):
            return each
        return torch.cat([each[:count], each[count:] * factor])

    asked = batch.question(question, rows)
    return replace(asked, inputs=batch.map(scaled, asked.inputs))


def _taken(tensor: Tensor, index: slice | Tensor) -> Tensor:
    return tensor[index.to(tensor.device) if isinstance(index, Tensor) else index]


def _is_equal(
    name: str, one: object, two: object, buffers: Mapping[str, Tensor], batch: Batch, count: int
) -> bool:
    if name.startswith("buffer "):
        old = buffers[name.removeprefix("buffer ")]
        return isinstance(one, Tensor) and same_values(one.to(old.dtype), old)
    if not batch.has_rows(name, one):
        # A gradient of a parameter is the sum over all rows. Any other result must have rows.
        return name.startswith("grad ") and name.removeprefix("grad ") not in batch.names
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return False
    mine, theirs = one[:count].double(), two[:count].double()
    return bool((mine - theirs).norm() <= _SAME * mine.norm())
