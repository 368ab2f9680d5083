"""Differences from eager mode that are known, each with its reason. Anything else is a failure."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from tests.opdb.cases import Entry


@dataclass(frozen=True)
class Known:
    """`operators`, `dtypes`, `variants` and `words` are patterns, as of file names."""

    operators: str
    reason: str
    words: str = "*"
    dtypes: str = "*"
    variants: str = "*"
    device: str = "*"

    def is_about(self, entry: Entry, variant: str, device: str, words: str) -> bool:
        pairs = (
            (self.operators, entry.name),
            (self.dtypes, entry.dtype),
            (self.variants, variant),
            (self.device, device),
            (self.words, words),
        )
        return all(
            any(fnmatch.fnmatchcase(text, each) for each in pattern.split("|"))
            for pattern, text in pairs
        )


_UNSET = "its memory is not initialised: eager gives other numbers at each call, too"

KNOWN = (
    Known("empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided", _UNSET),
)


def reason_for(entry: Entry, variant: str, device: str, words: str) -> str:
    """Why this difference is there. Empty if nobody has said so."""
    found = (each for each in KNOWN if each.is_about(entry, variant, device, words))
    return next((each.reason for each in found), "")
