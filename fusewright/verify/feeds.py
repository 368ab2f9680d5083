"""The inputs of candidates: sets of tensors at fixed addresses, always with new values.

A set's tensors stay at their addresses, as a CUDA graph needs it. Before every call they get new
values, which their version counters do not show. So a result that was cached by address, identity,
version or content is wrong at the next check.
"""

from __future__ import annotations

import random
from contextlib import suppress

import torch
from torch import Tensor

from fusewright.errors import FusewrightError
from fusewright.problem.inputs import copied, is_differentiable, is_overlapping, move, named_tensors
from fusewright.problem.load import Problem
from fusewright.problem.nested import map_leaves

# Values shrink by up to a quarter. Signs, zeros and ranges such as [0, 1] stay, and the results of
# other values are farther off than any precision.
_SHRINK = 0.25
_LEAST_SETS = 2
_MEMORY_SHARE = 0.125

Inputs = tuple[object, ...]


class Feed:
    """Input sets (`slots`), and the original values (`masters`) that new values are made from.

    All originals have the same form. `gradients` says whether the sets require gradients.
    """

    def __init__(self, masters: tuple[Inputs, ...], *, seed: int, gradients: bool = True) -> None:
        self.masters = masters
        self.slots = [copied(each, gradients=gradients) for each in masters]
        self.gradients = gradients
        self._random = random.Random(seed)
        self._turn = -1
        # The original and the factor of each set's last values, and the last original.
        self._origins = {index: (index, 1.0) for index in range(len(masters))}
        self._last = -1

    def __len__(self) -> int:
        return len(self.slots)

    def release(self) -> None:
        """Free the originals: from now on the sets themselves stand for them."""

        def detached(leaf: object) -> object:
            return leaf.detach() if isinstance(leaf, Tensor) else leaf

        self.masters = tuple(
            tuple(map_leaves(detached, each) for each in inputs) for inputs in self.slots
        )

    def require_gradients(self, wanted: bool) -> None:
        """Make the inputs require gradients, or not."""
        self.gradients = wanted
        for inputs in self.slots:
            for _, each in named_tensors(inputs):
                each.requires_grad_(wanted and is_differentiable(each))

    def refresh(self) -> int:
        """Write new values into the next set; returns its index."""
        self._turn = (self._turn + 1) % len(self.slots)
        self.fill(self._turn)
        return self._turn

    def fill(self, index: int) -> None:
        """Write new values into one set, from an original that was not just used."""
        source = self._random.choice(self._other_sources(index))
        factor = 1.0 - _SHRINK * self._random.random()
        self._origins[index], self._last = (source, factor), source
        both = (named_tensors(self.masters[source]), named_tensors(self.slots[index]))
        for (_, master), (_, mine) in zip(*both, strict=True):
            if is_differentiable(master):
                torch.mul(master, factor, out=mine.data)
            else:
                mine.data.copy_(master)

    def values(self, index: int) -> Inputs:
        """Copies of the values that a set was last filled with; a model may overwrite the set."""
        source, factor = self._origins[index]

        def made(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf * factor if is_differentiable(leaf) else leaf.clone()

        return tuple(map_leaves(made, each) for each in self.masters[source])

    def put(self, index: int, values: Inputs) -> None:
        """Write these values into a set's own tensors; a value of another form gets a new one."""
        held: list[Tensor] = []

        def hold(leaf: object) -> None:
            if isinstance(leaf, Tensor):
                held.append(leaf)

        def put(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            mine = held.pop(0) if held else None
            fits = mine is not None and _tensor_form(mine) == _tensor_form(leaf)
            if mine is not None and fits and not is_overlapping(mine) and not is_overlapping(leaf):
                mine.data.copy_(leaf)
                return mine
            fresh = leaf.detach() if is_overlapping(leaf) else leaf.detach().clone()
            return fresh.requires_grad_(self.gradients and is_differentiable(leaf))

        map_leaves(hold, self.slots[index])
        self.slots[index] = tuple(map_leaves(put, each) for each in values)

    def _other_sources(self, index: int) -> list[int]:
        every = range(len(self.masters))
        other = [each for each in every if each != self._origins[index][0]]
        return [each for each in other if each != self._last] or other or list(every)

    def targets(self, index: int) -> dict[str, Tensor]:
        """The tensors of a set that require a gradient."""
        return {name: each for name, each in named_tensors(self.slots[index]) if each.requires_grad}


def make_feed(
    problem: Problem, device: torch.device, *, sets: int, seed: int, gradients: bool = True
) -> Feed:
    """A feed with this many sets of a problem's inputs, or with as many as fit into memory."""
    torch.manual_seed(seed)
    first = make_inputs(problem, device)
    drawn = [make_inputs(problem, device) for _ in range(_affordable(sets, first, device) - 1)]
    alike = (each if form(each) == form(first) else first for each in drawn)
    return Feed((first, *alike), seed=seed, gradients=gradients)


def make_inputs(problem: Problem, device: torch.device) -> Inputs:
    """Fresh forward arguments on the device.

    A host needs seconds to draw a gigabyte, so a GPU draws them itself if the problem lets it.
    """
    if device.type == "cuda":
        with suppress(FusewrightError, RuntimeError, TypeError), torch.device(device):
            return tuple(move(each, device) for each in problem.make_inputs())
    return tuple(move(each, device) for each in problem.make_inputs())


def form(inputs: Inputs) -> tuple[object, ...]:
    """The names, shapes and types: inputs of the same form can take each other's values."""
    return tuple((name, each.shape, each.dtype) for name, each in named_tensors(inputs))


def _tensor_form(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.shape, tensor.dtype, tensor.device)


def _affordable(sets: int, inputs: Inputs, device: torch.device) -> int:
    """How many sets fit, with their originals, into an eighth of the free memory."""
    if device.type != "cuda":
        return max(sets, _LEAST_SETS)
    size = sum(each.nbytes for _, each in named_tensors(inputs))
    free, _ = torch.cuda.mem_get_info(device)
    most = int(free * _MEMORY_SHARE) // max(2 * size, 1)
    return max(min(sets, most), _LEAST_SETS)
