"""Where the inputs and incoming gradients of a request lie in the judge's memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusewright.errors import ProblemError
from fusewright.judge.arena import ALIGNMENT, Arena, aligned
from fusewright.judge.guarded import Form, Guarded, room
from fusewright.judge.wire import Node, dtype_name
from fusewright.verify.figures import same_values

Key = tuple[int, str]


@dataclass(frozen=True)
class Piece:
    """One tensor of a request; its `node` says where it lies. `call` is the number of its call."""

    call: int
    key: Key
    values: Tensor
    form: Form
    node: Node


def piece_of(call: int, key: Key, values: Tensor, *, odd: bool = False) -> Piece:
    """A tensor of a request; an odd one begins one element after an aligned address."""
    node: Node = {
        "tensor": -1,
        "shift": values.dtype.itemsize if odd else 0,
        "name": key[1],
        "dtype": dtype_name(values.dtype),
        "shape": list(values.shape),
        "stride": list(values.stride()),
    }
    form = (values.dtype, tuple(values.shape), tuple(values.stride()))
    return Piece(call, key, values.cpu(), form, node)


class Placement:
    """Chooses addresses, writes values, and sees afterwards what became of them."""

    def __init__(self, arena: Arena, chance: random.Random) -> None:
        self._arena, self._chance = arena, chance
        self._known: dict[Key, tuple[int, Form]] = {}
        self._pieces: Sequence[Piece] = ()
        self._guards: list[Guarded] = []

    def assign(self, pieces: Sequence[Piece], place: str) -> None:
        """Give each piece an offset: the one that its slot had before, or a new one."""
        offsets = self._old(pieces) if place != "fresh" else []
        if not offsets:
            offsets = self._new(pieces)
        self._pieces, self._guards = pieces, []
        for piece, offset in zip(pieces, offsets, strict=True):
            piece.node["offset"] = offset
            self._known[piece.key] = (offset, piece.form)
            memory = self._arena.bytes_at(offset, room(piece.form))
            self._guards.append(Guarded(piece.form, memory, piece.node["shift"]))

    def _old(self, pieces: Sequence[Piece]) -> list[int]:
        """The offsets of before; none if a piece is new, has another form, or two would overlap."""
        found = [self._known.get(each.key, (-1, None)) for each in pieces]
        if any(form != each.form for (_, form), each in zip(found, pieces, strict=True)):
            return []
        ends = sorted(
            (at, at + room(each.form)) for (at, _), each in zip(found, pieces, strict=True)
        )
        if any(before[1] > after[0] for before, after in itertools.pairwise(ends)):
            return []
        return [offset for offset, _ in found]

    def _new(self, pieces: Sequence[Piece]) -> list[int]:
        sizes = [aligned(room(each.form)) for each in pieces]
        spare = self._arena.inputs_bytes - sum(sizes)
        if spare < 0:
            raise ProblemError("the inputs of one request are larger than the memory for them")
        start = self._chance.randrange(spare // ALIGNMENT + 1) * ALIGNMENT
        return [start + sum(sizes[:index]) for index in range(len(sizes))]

    def write(self) -> None:
        for piece, guarded in zip(self._pieces, self._guards, strict=True):
            guarded.fill(piece.values)

    def damaged(self) -> list[str]:
        """The pieces whose guard zones were overwritten."""
        both = zip(self._pieces, self._guards, strict=True)
        return [f"input {piece.key[1]}" for piece, guarded in both if not guarded.is_intact]

    def changed(self, call: int) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the pieces of a call that have other values now."""
        for piece, guarded in zip(self._pieces, self._guards, strict=True):
            if piece.call == call and not same_values(piece.values, guarded.view()):
                yield piece.key[1], guarded.view().clone()
