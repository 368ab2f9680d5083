"""What the judge found: one word, the reason, the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from fusewright.judge.times import Conditions, PassTimes

# Code 2 is for everything that is no verdict: a bad option, a problem that cannot be used.
EXIT_CODES = {
    "accepted": 0,
    "wrong": 1,
    "dishonest": 3,
    "unsafe": 4,
    "crashed": 5,
    "timed out": 6,
}
_MOST_WORDS = 1200
# If one answer shows several faults, the first of these is told.
_GRAVEST = ("dishonest", "unsafe", "crashed", "timed out", "wrong")


@dataclass(frozen=True)
class Fault:
    """Why a candidate is not accepted, with the check that showed it."""

    word: str
    reason: str
    check: str = ""
    expected: str = ""
    seen: str = ""

    def in_lines(self) -> Fault:
        """The same in words that cannot pass for a line of ours."""
        return Fault(*(one_line(getattr(self, each.name)) for each in fields(self)))


@dataclass(frozen=True)
class Verdict:
    """The judgement of one candidate.

    `flags` are observations that are no fault. `notes` say what could not be asked. `output` is
    what the candidate printed, cut and escaped. `calls` were answered, and `checks` compared.
    `build_seconds` went by until the first calls were answered. `precisions` are the classes of
    each pass and of eager, `peak_bytes` what a call of each pass took. `times` are those of each
    pass, and `conditions` what they hold for.
    """

    word: str
    reason: str
    check: str = ""
    expected: str = ""
    seen: str = ""
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    output: str = ""
    calls: int = 0
    checks: int = 0
    seconds: float = 0.0
    candidate_seconds: float = 0.0
    confined: bool = True
    build_seconds: float | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    times: tuple[PassTimes, ...] = ()
    conditions: Conditions | None = None

    @property
    def accepted(self) -> bool:
        return self.word == "accepted"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def lines(self) -> tuple[str, ...]:
        """The verdict as text; the first line says it all."""
        evidence = [
            f"  {label}: {value}"
            for label, value in (
                ("check", self.check),
                ("expected", self.expected),
                ("seen", self.seen),
            )
            if value
        ]
        times = [f"  {each.line()}" for each in self.times]
        flags = [f"  flag: {each}" for each in self.flags]
        notes = [f"  note: {each}" for each in self.notes]
        shown = ["  the candidate printed:", *(f"  | {each}" for each in self.output.splitlines())]
        words = shown if self.output and not self.accepted else []
        return (f"{self.word}: {self.reason}", *evidence, *times, *flags, *notes, *words)


def gravest(faults: list[Fault]) -> Fault:
    return min(faults, key=lambda each: _GRAVEST.index(each.word))


def one_line(text: str) -> str:
    """Words of a stranger within a line of ours: no second line, no control characters, an end."""
    words = text if len(text) <= _MOST_WORDS else text[:_MOST_WORDS] + " …"
    plain = escaped(words.encode(errors="backslashreplace"), cut=False)
    return plain.replace("\n", "\\n").replace("\t", " ")


def escaped(output: bytes, *, cut: bool) -> str:
    """Text that cannot move a terminal's cursor or change its colours."""
    text = output.decode("utf-8", errors="backslashreplace")
    plain = "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text
    )
    return plain + "\n… (more was printed)" if cut else plain
