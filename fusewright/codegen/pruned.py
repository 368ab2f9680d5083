"""The support code of a text: what it needs of our headers, in one namespace.

A declaration is kept if something that is kept mentions its name. Overloads and specialisations
share a name, so all of them are kept, except those for types that nothing else mentions. Functions
of a type go if nothing mentions their name; its data stays. Whatever is unclear is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fusewright.codegen.reachable import BEGINS, CONDITION, ENDS, Headers, Part, Uses

_OURS = re.compile(r"\bfw::(\w+)|\b(FW_\w+|fw_\w+)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNDEF = re.compile(r"#undef (\w+)")


def support_lines(headers: Headers, text: str) -> list[str]:
    """The lines that the text needs, in the order of the headers."""
    kept = _Kept(headers, text)
    while kept.grows():
        pass
    return list(_printed(list(_without_empty(kept.parts())), kept))


class _Kept:
    """The parts that are kept so far, and the names that they mention."""

    def __init__(self, headers: Headers, text: str) -> None:
        self._headers = headers
        ours = {name or macro for name, macro in _OURS.findall(text)}
        self._all = {*_NAME.findall(text)}
        self._free, self._called = set(ours), set(ours)
        self._held: set[int] = set()

    def parts(self) -> list[Part]:
        return [each for each in self._headers.parts if self.holds(each) or _is_structure(each)]

    def holds(self, part: Part) -> bool:
        if undefined := _UNDEF.match(part.of.text):
            return undefined[1] in self._free
        return id(part) in self._held

    def grows(self) -> bool:
        """Keep what the names so far ask for. Returns whether that was anything."""
        before = len(self._held)
        for part in self._headers.parts:
            if not self.holds(part) and self._is_wanted(part):
                self._hold(part)
            if self.holds(part):
                self._hold_members(part)
        return len(self._held) > before

    def _is_wanted(self, part: Part) -> bool:
        if not part.names:
            return not (CONDITION.match(part.of.text) or _UNDEF.match(part.of.text))
        headers = self._headers
        if not any(
            n in (self._called if n in headers.functions else self._free) for n in part.names
        ):
            return False
        if headers.overloaded.isdisjoint(part.names):
            return True
        return part.mentions & headers.types <= self._free

    def _is_used(self, name: str) -> bool:
        return name in (self._called if name in self._headers.functions else self._free)

    def _hold(self, part: Part) -> None:
        self._held.add(id(part))
        uses: Uses = part.uses
        self._all |= uses.all
        self._free |= uses.free
        self._called |= uses.called

    def _hold_members(self, part: Part) -> None:
        for member in part.members:
            if id(member) not in self._held and self._is_needed(member, part):
                self._hold(member)
            if id(member) in self._held:
                self._hold_members(member)

    def _is_needed(self, member: Part, of: Part) -> bool:
        if not member.names or not self._all.isdisjoint(member.names):
            return True
        if member.of.kind == "variable":
            return "static" not in (each.text for each in member.of.tokens[:2])
        return not set(of.names).isdisjoint(member.names)  # a constructor

    def member_is_held(self, member: Part) -> bool:
        return id(member) in self._held


def _is_structure(part: Part) -> bool:
    return part.of.kind == "directive" and bool(CONDITION.match(part.of.text))


def _without_empty(parts: Sequence[Part]) -> list[Part]:
    """Without conditions that have no other parts."""
    kept: list[Part] = []
    began: list[int] = []
    for part in parts:
        found = CONDITION.match(part.of.text) if _is_structure(part) else None
        kept.append(part)
        if found and found[1] in BEGINS:
            began.append(len(kept) - 1)
        elif found and found[1] in ENDS:
            first = began.pop()
            if all(_is_structure(each) for each in kept[first:]):
                del kept[first:]
    return kept


def _printed(parts: Sequence[Part], kept: _Kept) -> Iterator[str]:
    """The lines of these parts, with the brackets of our namespace."""
    inside = False
    for at, part in enumerate(parts):
        wanted = _namespace(parts, at, inside)
        if wanted != inside:
            yield from ["", "namespace fw {", ""] if wanted else ["", "}  // namespace fw", ""]
            inside = wanted
        elif part.of.gap:
            yield ""
        yield from _text(part, kept).split("\n")
    if inside:
        yield from ["", "}  // namespace fw"]


def _namespace(parts: Sequence[Part], at: int, inside: bool) -> bool:
    """Whether this part stands in our namespace. Directives stand anywhere; a condition where the
    first declaration in it does, and ends there."""
    found = CONDITION.match(parts[at].of.text)
    if found and found[1] not in BEGINS:
        return inside
    for part in parts[at:]:
        if part.of.kind != "directive":
            return part.inside
        if not _is_structure(part):
            return inside
    return inside


def _text(part: Part, kept: _Kept) -> str:
    """A declaration without the members that are not kept."""
    of = part.of
    if all(map(kept.member_is_held, part.members)) and not any(m.members for m in part.members):
        return of.text
    held = [each for each in part.members if kept.member_is_held(each)]
    first, last = of.body
    start = of.tokens[0].start
    head = of.text[: of.tokens[first - 1].end - start]
    tail = of.text[of.tokens[last].start - start :]
    if not held:
        return head + tail
    lines = []
    for at, each in enumerate(held):
        gap = "\n" if each.of.gap and at else ""
        lines.append(gap + " " * each.of.indent + _text(each, kept))
    return "\n".join([head, *lines, " " * of.indent + tail])
