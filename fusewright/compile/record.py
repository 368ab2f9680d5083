"""What became of the calls of one optimized module, for its `explain`.

Only calls that fit no program are recorded, so a call of a known kind costs nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from fusewright import debug

# Reasons name sizes and values. More of them than this are counted together.
MOST_REASONS = 64
OTHER_REASONS = "other reasons"


class Record:
    """Calls that ran the original forward, recompilations, and what our guards cannot compare.

    Each is counted by its reason. Several threads may write at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fallbacks: dict[str, int] = {}
        self._recompilations: dict[str, int] = {}
        self._unguarded: dict[str, int] = {}

    def ran_original(self, reason: str) -> None:
        self._count(self._fallbacks, reason)

    def unguarded(self, reason: str) -> None:
        """A program of ours could not stand for other calls, for this reason."""
        self._count(self._unguarded, reason)

    def recompiled(self, name: str, reason: str) -> None:
        """New kernels were compiled for a call. The first time, the log says why."""
        if self._count(self._recompilations, reason) == 1:
            how = "later ones are silent; fusewright.explain(module) lists them all"
            debug.tell("%s was recompiled because %s (%s)", name, reason, how)
        else:
            debug.log(1, "%s was recompiled because %s", name, reason)

    def fallbacks(self) -> Mapping[str, int]:
        return self._copy(self._fallbacks)

    def recompilations(self) -> Mapping[str, int]:
        return self._copy(self._recompilations)

    def reasons_unguarded(self) -> Mapping[str, int]:
        return self._copy(self._unguarded)

    def for_a_copy(self) -> Record:
        """The record of a copied module: it has the same programs, and no calls of its own."""
        made = Record()
        made._recompilations = self._copy(self._recompilations)
        made._unguarded = self._copy(self._unguarded)
        return made

    def _count(self, counts: dict[str, int], reason: str) -> int:
        """Add one; the sum over all reasons."""
        with self._lock:
            key = reason if reason in counts or len(counts) < MOST_REASONS else OTHER_REASONS
            counts[key] = counts.get(key, 0) + 1
            return sum(counts.values())

    def _copy(self, counts: dict[str, int]) -> dict[str, int]:
        with self._lock:
            return dict(counts)
