"""What Dynamo does not guard, compared before it is asked: methods of classes, names of builtins,
and what older versions of it do not notice.

A change there makes another state, for which a class is compiled anew.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Hashable
from typing import Any

from torch import nn

from fusewright.capture.beside import NOTHING, Beside, Same, together
from fusewright.capture.reads import Environment, Watched
from fusewright.errors import UnguardedError
from fusewright.runtime import altered, constants

# More states than this are not worth their compilations.
MOST_STATES = 8


class Places:
    """Watched places of one module and all objects that were found there, and what is `beside`."""

    def __init__(self, rows: tuple[Watched, ...] = (), beside: Beside = NOTHING) -> None:
        self.rows, self.beside = rows, beside
        self.names = [(identity(place), name) for place, name, _ in rows]
        self.states: set[Hashable] = set()

    @staticmethod
    def named_by(error: Exception) -> Places:
        """The places that an error names."""
        if not isinstance(error, UnguardedError):
            return Places()
        return Places(error.watched, error.beside if isinstance(error.beside, Beside) else NOTHING)

    def __or__(self, other: Places) -> Places:
        rows = dict(zip((*self.names, *other.names), (*self.rows, *other.rows), strict=True))
        made = Places(tuple(rows.values()), together((self.beside, other.beside)))
        made.states = self.states
        return made

    def __bool__(self) -> bool:
        return bool(self.rows) or self.beside != NOTHING

    def state(self, module: nn.Module) -> Hashable | None:
        """What is there now; None if there were too many states."""
        state = (self._found(module), self.beside.state(module))
        self.states.add(state)
        return state if len(self.states) <= MOST_STATES else None

    def _found(self, module: nn.Module) -> Hashable:
        """What the places hold: the same for all modules whose places hold the same objects."""
        now = []
        for place, name, _ in self.rows:
            inside = isinstance(place, tuple)
            held = vars(altered._fw_inside(module, place)) if inside else place
            now.append(Same(held.get(name, constants._FwGone)))
        return tuple(zip(self.names, now, strict=True))


def identity(place: Any) -> Any:
    """Of a dictionary or path. Each `vars(kind)` is another proxy of the same dictionary."""
    if isinstance(place, tuple):
        return place
    if isinstance(place, Environment):
        return Environment  # there is one
    return id(gc.get_referents(place)[0] if isinstance(place, types.MappingProxyType) else place)
