"""What a deliberate bug is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old` becomes `new`. `why` says what is then wrong. `tests` are expected to fail,
    the likeliest first: files, or files with a pattern of names behind a space."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """The text of the file with the bug in it."""
        text = (root / self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            raise LookupError(f"{self.name}: its text occurs {found} times in {self.file}")
        return text.replace(self.old, self.new)
