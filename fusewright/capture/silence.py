"""Warnings that are not shown while a block runs, in several threads at once.

`warnings.catch_warnings` saves the filters of the whole process and puts them back. If the blocks
of two threads overlap, a filter of one of them stays for good. Here a filter is added by the first
block and removed by the last.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LOCK = threading.Lock()


@dataclass
class _Filter:
    """A filter in use: the list that it was added to, and how many blocks run."""

    row: tuple[Any, ...]
    added_to: list[Any]
    blocks: int = 0


_FILTERS: dict[str, _Filter] = {}


@contextlib.contextmanager
def silenced(beginning: str = "") -> Iterator[None]:
    """Show no warnings, or none with this beginning."""
    _add(beginning)
    try:
        yield
    finally:
        _remove(beginning)


def _add(beginning: str) -> None:
    with _LOCK:
        if beginning not in _FILTERS:
            # The comment in the pattern tells this filter from an equal one of the user.
            warnings.filterwarnings("ignore", message=f"(?#fusewright){beginning}")
            filters: Any = warnings.filters
            _FILTERS[beginning] = _Filter(filters[0], filters)
        _FILTERS[beginning].blocks += 1


def _remove(beginning: str) -> None:
    with _LOCK:
        found = _FILTERS[beginning]
        found.blocks -= 1
        if found.blocks:
            return
        del _FILTERS[beginning]
        current: Any = warnings.filters
        for filters in (current, found.added_to):  # others, if somebody catches warnings meanwhile
            with contextlib.suppress(ValueError):
                filters.remove(found.row)
