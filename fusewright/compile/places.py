"""What Dynamo does not guard, compared before it is asked: methods of classes, names of builtins.

A change of such a place makes another identity, under which a class is compiled anew.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fusewright.capture.reads import Watched
from fusewright.runtime import altered, constants


class Places:
    """Watched places of one module, and all objects that were found there."""

    def __init__(self, rows: tuple[Watched, ...] = ()) -> None:
        self.rows = rows
        self.first = [value for _, _, value in rows]
        self.known: dict[tuple[int, ...], list[Any]] = {}  # keeps the objects alive

    def found(self, module: nn.Module) -> tuple[int, ...]:
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
