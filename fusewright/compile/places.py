"""What Dynamo does not guard, compared before it is asked: methods of classes, names of builtins,
and what older versions of it do not notice.

A change there makes another version, for which a class is compiled anew.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import nn

from fusewright.capture.beside import NOTHING, Beside, Zeros, together
from fusewright.capture.reads import Environment, Watched
from fusewright.errors import UnguardedError
from fusewright.runtime import altered, constants

# A module that needs more versions than this is not worth their compilations.
MOST_MADE = 8


class Places:
    """Watched places of one module, which are all that the `codes` need, and what is `beside`; and
    how many versions its calls have `made`."""

    def __init__(
        self,
        rows: tuple[Watched, ...] = (),
        beside: Beside = NOTHING,
        codes: frozenset[types.CodeType] = frozenset(),
    ) -> None:
        self.rows, self.beside, self.codes = rows, beside, codes
        self.made = 0
        cells = tuple(map(id, beside.cells))
        names = frozenset((identity(place), name) for place, name, _ in rows)
        # Modules with the same key can share versions.
        self.key: Hashable = (names, cells, beside.gradients)

    @staticmethod
    def named_by(error: Exception) -> Places:
        """The places that an error names."""
        if not isinstance(error, UnguardedError):
            return Places()
        beside = error.beside if isinstance(error.beside, Beside) else NOTHING
        return Places(error.watched, beside, error.codes)

    def __or__(self, other: Places) -> Places:
        rows = {(identity(place), name): (place, name, value) for place, name, value in self.rows}
        rows |= {(identity(place), name): (place, name, value) for place, name, value in other.rows}
        beside, codes = together((self.beside, other.beside)), self.codes | other.codes
        made = Places(tuple(rows.values()), beside, codes)
        made.made = self.made
        return made

    def __bool__(self) -> bool:
        return bool(self.rows) or self.beside != NOTHING


class Version:
    """One compilation of a class's forward by Dynamo, and the objects that a call of it must find
    at their places. `run` is set by who makes it."""

    run: Callable[..., Any]

    def __init__(self, module: nn.Module, places: Places) -> None:
        self.beside, self.state = places.beside, places.beside.state(module)
        self.codes = set(places.codes)
        self.kinds = {type(each) for each in module.modules()}
        self._known: set[Hashable] = set()
        self.zeros = Zeros()
        self._held: list[Watched] = []
        self._inside: list[Watched] = []
        self.watch(module, places.rows)

    def is_known(self, module: nn.Module, codes: Iterable[types.CodeType]) -> bool:
        """Whether all that these codes need is watched. Two classes may share their code."""
        kinds = {type(each) for each in module.modules()}
        known = self.codes.issuperset(codes) and self.kinds >= kinds
        self.codes.update(codes)
        self.kinds |= kinds
        return known

    def watch(self, module: nn.Module, rows: Iterable[Watched]) -> None:
        """Later calls must find at these places what is there now."""
        for place, name, _ in rows:
            key = (identity(place), name)
            if key not in self._known:
                self._known.add(key)
                inside = isinstance(place, tuple)
                held = vars(altered._fw_inside(module, place)) if inside else place
                row = (place, name, held.get(name, constants._FwGone))
                (self._inside if inside else self._held).append(row)

    def fits(self, module: nn.Module) -> bool:
        """Whether a call of the module finds all that it was compiled for."""
        gone = constants._FwGone
        for place, name, value in self._held:
            if place.get(name, gone) is not value:
                return False
        for path, name, value in self._inside:
            if vars(altered._fw_inside(module, path)).get(name, gone) is not value:
                return False
        same = self.beside == NOTHING or self.beside.state(module) == self.state
        return same and self.zeros.fit(module)


def identity(place: Any) -> Any:
    """Of a dictionary or path. Each `vars(kind)` is another proxy of the same dictionary."""
    if isinstance(place, tuple):
        return place
    if isinstance(place, Environment):
        return Environment  # there is one
    return id(gc.get_referents(place)[0] if isinstance(place, types.MappingProxyType) else place)
