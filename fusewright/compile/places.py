"""What Dynamo does not guard, compared before it is asked: methods of classes, names of builtins,
and what older versions of it do not notice.

A change there makes another state, for which a class is compiled anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

from fusewright.capture.beside import NOTHING, Beside, together
from fusewright.capture.reads import Watched
from fusewright.errors import UnguardedError
from fusewright.runtime import altered, constants

# More states than this are not worth their compilations.
MOST_STATES = 8


class Places:
    """Watched places of one module and all objects that were found there, and what is `beside`."""

    def __init__(self, rows: tuple[Watched, ...] = (), beside: Beside = NOTHING) -> None:
        self.rows, self.beside = rows, beside
        self.first = [value for _, _, value in rows]
        self.known: dict[tuple[int, ...], list[Any]] = {}  # keeps the objects alive
        self.states: set[Hashable] = set()

    @staticmethod
    def named_by(error: Exception) -> Places:
        """The places that an error names."""
        if not isinstance(error, UnguardedError):
            return Places()
        return Places(error.watched, error.beside if isinstance(error.beside, Beside) else NOTHING)

    def __or__(self, other: Places) -> Places:
        rows = other.rows or self.rows
        made = Places(rows, together((self.beside, other.beside)))
        made.states = self.states
        return made

    def __bool__(self) -> bool:
        return bool(self.rows) or self.beside != NOTHING

    def state(self, module: nn.Module) -> Hashable | None:
        """What is there now; None if there were too many states."""
        state = (self._found(module), self.beside.state(module))
        self.states.add(state)
        return state if len(self.states) <= MOST_STATES else None

    def _found(self, module: nn.Module) -> tuple[int, ...]:
        """Empty if the places hold what they held at first, else the identity of what they hold."""
        now = []
        for place, name, _ in self.rows:
            inside = isinstance(place, tuple)
            held = vars(altered._fw_inside(module, place)) if inside else place
            now.append(held.get(name, constants._FwGone))
        if all(new is old for new, old in zip(now, self.first, strict=True)):
            return ()
        key = tuple(map(id, now))
        self.known[key] = now
        return key
