"""The inputs that candidates are timed on: several sets at their own addresses, always new values.

A set's tensors stay where they are, as a CUDA graph needs it, and get new values before every
call, written without a trace in their version counters. So a result that was remembered by
address, identity, version or content is wrong at the next check.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fusewright.inputs import copied, is_differentiable, move, named_tensors
from fusewright.problem import Problem

# Values shrink by up to a sixty-fourth: signs, ranges such as [0, 1] and zeros stay.
_SHRINK = 2.0**-6
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
        first = _made(problem, device)
        count = _affordable(sets, first, device)
        masters = (first, *(_made(problem, device) for _ in range(count - 1)))
        self._hold(masters, tuple(copied(each, gradients=gradients) for each in masters), seed)

    @classmethod
    def of(cls, inputs: tuple[object, ...]) -> Feed:
        """A single set of inputs, as they are."""
        feed = cls.__new__(cls)
        feed._hold((inputs,), (inputs,), 0)
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
        self._mixable = len({_form(each) for each in masters}) == 1

    def __len__(self) -> int:
        return len(self.slots)

    def refresh(self) -> int:
        """Write new values into the next set; gives that set's index."""
        self._turn = (self._turn + 1) % len(self.slots)
        self.fill(self._turn)
        return self._turn

    def fill(self, index: int) -> None:
        """New values for one set, from any of the originals."""
        source = self._random.randrange(len(self.masters)) if self._mixable else index
        factor = 1.0 - _SHRINK * self._random.random()
        given = zip(
            named_tensors(self.masters[source]), named_tensors(self.slots[index]), strict=True
        )
        for (_, master), (_, mine) in given:
            if is_differentiable(master):
                torch.mul(master, factor, out=mine.data)
            else:
                mine.data.copy_(master)

    def targets(self, index: int) -> dict[str, Tensor]:
        """The tensors of a set that want a gradient."""
        return {name: each for name, each in named_tensors(self.slots[index]) if each.requires_grad}


def _made(problem: Problem, device: torch.device) -> tuple[object, ...]:
    return tuple(move(each, device) for each in problem.make_inputs())


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
