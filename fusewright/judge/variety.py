"""New values for each call: inputs, incoming gradients, and what changes between calls.

Nothing of a call may follow from an earlier one. Otherwise a file could keep a part of its work:
the product of weights with a gradient that is always the same, a sum that grows by a known factor,
the mask of a dropout whose seed is the next number.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusewright.problem.inputs import copied, seed_all
from fusewright.problem.nested import map_leaves
from fusewright.verify.attributes import restore_attributes
from fusewright.verify.feeds import Inputs
from fusewright.verify.figures import root_mean_square
from fusewright.verify.reference import Reference
from fusewright.verify.run import restore

RATE = 0.5
LARGE_BYTES = 1 << 24
# Elements shrink by up to a quarter, for problems that always draw the same ones.
_SHRINK = 0.25
# An optimizer step changes each weight by about so much of the usual one.
_STEP, _LEAST_STEP = 0.4, 0.02
# The share of elements that every second step changes, of weights with more than a few.
_CHANGED, _FEW = 0.25, 8
# The share of weights whose signs an optimizer step turns.
_TURNED = 0.4
# Half of all incoming gradients have an unusual size, by up to so many powers of ten.
_UNUSUAL, _POWERS = 0.5, 2.0
_WIDE = (torch.float32, torch.float64)


def shrunk(inputs: Inputs) -> Inputs:
    """Inputs of which no sum or product is known from those before."""

    def each(leaf: object) -> object:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return _shrunk(leaf) if floating else leaf  # type: ignore[arg-type]

    return tuple(map_leaves(each, leaf) for leaf in inputs)


def _shrunk(leaf: Tensor) -> Tensor:
    """Each element by the product of one factor for each dimension.

    Dimensions of equal size share their factors: what is symmetric stays so. What is zero stays
    zero, and a range such as [0, 1] holds.
    """
    sizes = [each for each in leaf.shape if each > 1]
    share = _SHRINK / max(len(sizes), 1)
    factors = {size: 1.0 - share * torch.rand(size) for size in dict.fromkeys(sizes)}
    found = leaf if sizes else leaf * (1.0 - share * float(torch.rand(())))
    for dim, size in enumerate(leaf.shape):
        if size > 1:
            shape = [1] * leaf.dim()
            shape[dim] = size
            found = found * factors[size].view(shape).to(leaf)
    return found


def halves(names: Sequence[str], count: int, chance: random.Random) -> tuple[tuple[str, ...], ...]:
    """So many parts of the names, in pairs that complete each other; some may be empty.

    Of two of eight names, each is once in a part without the other; of more, mostly.
    """
    bits = range(count // 2)
    codes = [number % (1 << len(bits)) for number in range(len(names))]
    chance.shuffle(codes)
    named = list(zip(names, codes, strict=True))
    parts = [
        [tuple(n for n, code in named if code >> bit & 1 == k) for k in (0, 1)] for bit in bits
    ]
    return tuple(part if len(part) < len(names) else () for pair in parts for part in pair)


class FreshGradients:
    """Gives a reference other incoming gradients for each call, of the same shapes."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._first = self._mine = reference.tangents

    def renew(self, chance: random.Random) -> None:
        if self._mine is not self._reference.tangents:  # it has drawn some of other shapes
            self._first = self._reference.tangents
        seed_all(chance.getrandbits(31))
        self._mine = {name: self._drawn(each, chance) for name, each in self._first.items()}
        self._reference.tangents = self._mine

    def _drawn(self, like: Tensor, chance: random.Random) -> Tensor:
        """Around one or minus one, not zero: a sum that cancels has no digits to compare."""
        drawn = torch.randn_like(like) + 1 if like.nbytes < LARGE_BYTES else _shrunk(like)
        size = 1.0 if chance.random() < 0.5 else -1.0
        if like.dtype in _WIDE and chance.random() < _UNUSUAL:
            size *= 10.0 ** chance.uniform(-_POWERS, _POWERS)
        return drawn * size


class Changes:
    """Weights change as an optimizer changes them, buffers as training does."""

    def __init__(
        self, model: nn.Module, references: Mapping[str, Reference], chance: random.Random
    ) -> None:
        self._model, self._references, self._chance = model, references, chance
        self._turned: set[str] = set()
        self._steps = chance.randrange(2)

    def train_once(self, inputs: Inputs) -> None:
        """The buffers move as in a training step; the weights stay."""
        reference = self._references.get("train")
        if reference is None or not reference.buffers:
            return
        restore(self._model, reference.buffers)
        self._model.train()
        try:
            with torch.no_grad():
                self._model(*copied(inputs, gradients=False))
            moved = {n: each.detach().clone() for n, each in self._model.named_buffers()}
        except (RuntimeError, ValueError):  # the model does not take these inputs in this mode
            moved = dict(reference.buffers)
        if all(bool(each.isfinite().all()) for each in moved.values()):
            for each in self._references.values():
                each.buffers = moved
        restore(self._model, reference.buffers)
        restore_attributes(self._model, reference.attributes)

    def new_weights(self) -> Mapping[str, Tensor]:
        """Change the weights as SGD does it; returns the gradients of the step.

        Every second step leaves most elements as they were.
        """
        self._steps += 1
        named = {n: e for n, e in self._model.named_parameters() if e.is_floating_point()}
        seed_all(self._chance.getrandbits(31))
        gradients = {
            name: self._chosen(torch.randn(each.shape, dtype=each.dtype, device=each.device))
            * (_STEP * root_mean_square(each) + _LEAST_STEP)
            for name, each in named.items()
        }
        if self._changes_all:
            gradients |= self._other_signs(named, gradients)
        with torch.no_grad():
            for name, each in named.items():
                each.add_(gradients[name], alpha=-RATE)
        return gradients

    def _other_signs(
        self, named: Mapping[str, Tensor], drawn: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Steps that turn the signs of some weights, and back again at the next step."""
        turned = self._turned or {n for n in named if self._chance.random() < _TURNED}
        self._turned = set() if self._turned else turned
        return {name: named[name].detach() * (2.0 / RATE) for name in turned if name in drawn}

    @property
    def _changes_all(self) -> bool:
        return self._steps % 2 == 0

    def _chosen(self, gradient: Tensor) -> Tensor:
        """All elements, or some: those that a file would look at to see a change are as before."""
        if self._changes_all or gradient.numel() < _FEW:
            return gradient
        kept = torch.rand(gradient.shape, device=gradient.device) < _CHANGED
        kept.view(-1)[[0, -1]] = False
        return gradient * kept
