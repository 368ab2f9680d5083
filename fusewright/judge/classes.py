"""The precision classes of a candidate's results, over all its plain calls."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.verify.classes import coarseness, coarsest
from fusewright.verify.compare import Check


class Classes:
    """By result: the coarsest class of an output, and of a gradient the middle one of all calls.

    Within rounding of a kink a gradient may be off as by a lower precision, with some values.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, list[str]] = {}
        self._own = ""

    def note(self, checks: Sequence[Check]) -> None:
        for each in checks:
            if not each.precision or ", slice " in each.name:
                continue
            self._own = self._own or next(iter(each.limits), "")
            self._by_name.setdefault(each.name, []).append(each.precision)

    def by_pass(self) -> dict[str, str]:
        """The class of each pass, and under "eager" the finest that there is."""
        named = [(name, _settled(name, seen)) for name, seen in self._by_name.items()]
        found = {
            "forward": coarsest([each for name, each in named if "grad " not in name]),
            "train": coarsest([each for _, each in named]),
            "eager": self._own,
        }
        return {name: each for name, each in found.items() if each}


def _settled(name: str, seen: Sequence[str]) -> str:
    ranked = sorted(seen, key=coarseness)
    return ranked[len(ranked) // 2] if "grad " in name else ranked[-1]
