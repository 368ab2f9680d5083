"""The inputs that candidates are timed on: several sets at their own addresses, always new values.

A set's tensors stay where they are, as a CUDA graph needs it, and get new values before every
call, written without a trace in their version counters. So a result that was remembered by
address, identity, version or content is wrong at the next check.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from fusewright.problem.inputs import copied, is_differentiable, move, named_tensors
from fusewright.problem.load import Problem

# Values shrink by up to a quarter: signs, ranges such as [0, 1] and zeros stay, and what was
# remembered from other values is farther off than any precision.
_SHRINK = 0.25
_LEAST_SETS = 2
_MEMORY_SHARE = 0.125


class Feed:
    """Input sets (`slots`), and the original values (`masters`) that new ones are made from."""

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        *,
        sets: int,
        seed: int,
        gradients: bool,
    ) -> None:
        torch.manual_seed(seed)
        first = _drawn(problem, device)
        count = _affordable(sets, first, device)
        masters = (first, *(_drawn(problem, device) for _ in range(count - 1)))
        slots = tuple(copied(each, gradients=gradients) for each in masters)
        self._hold(masters, slots, seed)

    @classmethod
    def of(cls, inputs: tuple[object, ...]) -> Feed:
        """A single set of inputs, as they are."""
        feed = cls.__new__(cls)
        only = (inputs,)
        feed._hold(only, only, 0)
        return feed

    def _hold(
        self,
        masters: tuple[tuple[object, ...], ...],
        slots: tuple[tuple[object, ...], ...],
        seed: int,
    ) -> None:
        self.masters, self.slots = masters, slots
        self._random = random.Random(seed)
        self._turn = -1
        # The original and the factor that each set was last made from, and the last original.
        self._origins = {index: (index, 1.0) for index in range(len(slots))}
        self._last = -1
        self._mixable = len({_form(each) for each in masters}) == 1

    def __len__(self) -> int:
        return len(self.slots)

    def refresh(self) -> int:
        """Write new values into the next set; gives that set's index."""
        self._turn = (self._turn + 1) % len(self.slots)
        self.fill(self._turn)
        return self._turn

    def fill(self, index: int) -> None:
        """New values for one set, from any of the originals but those that were just used."""
        source = self._random.choice(self._other_sources(index)) if self._mixable else index
        self._origins[index] = (source, 1.0 - _SHRINK * self._random.random())
        self._last = source
        self.again(index)

    def again(self, index: int) -> None:
        """The same values once more, for a set that a model may have written into."""
        if self.masters is self.slots:
            return
        for _, master, mine, factor in self._made(index):
            if factor is None:
                mine.data.copy_(master)
            else:
                torch.mul(master, factor, out=mine.data)

    def written(self, index: int) -> set[str]:
        """Which tensors of a set no longer hold the values that they were given."""
        return {
            name
            for name, master, mine, factor in self._made(index)
            if not _equal(master if factor is None else master * factor, mine.data)
        }

    def _made(self, index: int) -> Iterator[tuple[str, Tensor, Tensor, float | None]]:
        """Name, original and copy of each tensor; the factor is None where there can be none."""
        source, factor = self._origins[index]
        given = zip(
            named_tensors(self.masters[source]), named_tensors(self.slots[index]), strict=True
        )
        for (name, master), (_, mine) in given:
            yield name, master, mine, factor if is_differentiable(master) else None

    def _other_sources(self, index: int) -> list[int]:
        every = range(len(self.masters))
        other = [each for each in every if each != self._origins[index][0]]
        return [each for each in other if each != self._last] or other or list(every)

    def targets(self, index: int) -> dict[str, Tensor]:
        """The tensors of a set that want a gradient."""
        return {name: each for name, each in named_tensors(self.slots[index]) if each.requires_grad}


def _drawn(problem: Problem, device: torch.device) -> tuple[object, ...]:
    return tuple(move(each, device) for each in problem.make_inputs())


def _equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right) or bool(torch.isclose(left, right, 0, 0, equal_nan=True).all())


def _form(inputs: tuple[object, ...]) -> tuple[object, ...]:
    return tuple((name, each.shape, each.dtype) for name, each in named_tensors(inputs))


def _affordable(sets: int, inputs: tuple[object, ...], device: torch.device) -> int:
    """As many sets as fit beside their originals in an eighth of the free memory."""
    if device.type != "cuda":
        return max(sets, _LEAST_SETS)
    size = sum(each.nbytes for _, each in named_tensors(inputs))
    free, _ = torch.cuda.mem_get_info(device)
    most = int(free * _MEMORY_SHARE) // max(2 * size, 1)
    return max(min(sets, most), _LEAST_SETS)
