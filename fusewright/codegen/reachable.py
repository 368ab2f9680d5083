"""Parsed headers: each declaration with the names that it declares and those that it uses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fusewright.codegen.declarations import (
    Declaration,
    Macro,
    Token,
    declarations,
    expanded,
    macro_of,
    tokens_of,
)
from fusewright.codegen.preprocess import resolved, without_comments

# Lines that begin and end a part of the text, and go with it.
CONDITION = re.compile(r"(?:#|// clang-format )(if|ifdef|ifndef|elif|else|endif|off|on)\b")
BEGINS, ENDS = ("if", "ifdef", "ifndef", "off"), ("endif", "on")
_INCLUDE = re.compile(r"#include <")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Uses:
    """The names that a text mentions: all of them, those that may be names of a namespace, and of
    these the ones that may be called."""

    all: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()

    @staticmethod
    def union(uses: Iterable[Uses]) -> Uses:
        listed = list(uses)
        return Uses(
            frozenset().union(*(each.all for each in listed)),
            frozenset().union(*(each.free for each in listed)),
            frozenset().union(*(each.called for each in listed)),
        )


@dataclass(frozen=True)
class Part:
    """A declaration and what it uses. An overload or specialisation is for these `types`. `inside`
    says whether it is in our namespace. Of a type, `uses` is without its members."""

    of: Declaration
    uses: Uses
    inside: bool = False
    names: tuple[str, ...] = ()
    mentions: frozenset[str] = frozenset()
    members: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Headers:
    """Parsed headers. `functions` are names that only functions have, `overloaded` those with
    several declarations."""

    parts: tuple[Part, ...]
    functions: frozenset[str]
    overloaded: frozenset[str]
    types: frozenset[str]
    includes: tuple[str, ...]


@lru_cache(maxsize=32)
def parsed(text: str, defined: frozenset[tuple[str, bool]]) -> Headers:
    """The declarations of our headers if these macros are defined or not."""
    lines = resolved(without_comments(text.splitlines()), dict(defined))
    code = "\n".join(lines) + "\n"
    parts = list(_parts(code, tokens_of(code)))
    includes = dict.fromkeys(each.of.text for each in parts if _INCLUDE.match(each.of.text))
    rest = tuple(each for each in parts if not _INCLUDE.match(each.of.text))
    counts = Counter(name for each in rest for name in each.names)
    others = {n for each in rest if not _is_function(each) for n in each.names}
    types = frozenset(n for each in rest if each.of.kind == "type" for n in each.names)
    overloaded = frozenset(name for name, count in counts.items() if count > 1)
    return Headers(rest, frozenset(counts) - others, overloaded, types, tuple(includes))


def _is_function(part: Part) -> bool:
    return part.of.kind in ("function", "macro")


def _parts(code: str, tokens: Sequence[Token]) -> Iterator[Part]:
    """The declarations of a text, without the brackets of namespaces."""
    macros: dict[str, Macro] = {}
    inside = False
    around: list[frozenset[str]] = []
    for each in declarations(code, tokens):
        if each.kind in ("namespace", "end"):
            inside = each.kind == "namespace"
            continue
        condition = CONDITION.match(each.text) if each.kind == "directive" else None
        if condition and condition[1] in BEGINS:
            around.append(frozenset(_NAME.findall(each.text)))
        elif condition and condition[1] in ENDS:
            around.pop()
        part = _part(code, each, macros)
        wanted = frozenset[str]().union(*around)
        uses = Uses.union([part.uses, Uses(wanted, wanted, wanted)])
        yield replace(part, inside=inside, uses=part.uses if condition else uses)


def _part(code: str, of: Declaration, macros: dict[str, Macro]) -> Part:
    """A declaration with its uses. Macros are added to `macros` as they are defined."""
    if of.kind == "directive" and (macro := macro_of(of.text)):
        macros[macro[0]] = macro[1]
    if of.kind == "macro":
        return _invoked(of, macros)
    if of.kind == "type" and of.body[1]:
        first, last = of.body
        inner = declarations(code, of.tokens[first:last])
        members = tuple(_part(code, each, macros) for each in inner)
        uses = uses_of([*of.tokens[:first], *of.tokens[last:]], set())
        return Part(of, uses, names=of.names, mentions=_mentions(of), members=members)
    own = {of.parameters[0] - 1} if of.kind == "function" else set()
    return Part(of, uses_of(of.tokens, own), names=of.names, mentions=_mentions(of))


def _mentions(of: Declaration) -> frozenset[str]:
    first, last = of.parameters
    return frozenset(each.text for each in of.tokens[first:last] if each.kind == "name")


def _invoked(of: Declaration, macros: dict[str, Macro]) -> Part:
    """A macro that declares functions: it has the names of what it stands for."""
    uses, names = uses_of(of.tokens, set()), tuple[str, ...]()
    if of.tokens[0].text in macros:
        text = expanded(macros[of.tokens[0].text], of.tokens)
        inner = [_part(text, each, macros) for each in declarations(text, tokens_of(text))]
        names = tuple(name for each in inner for name in each.names)
        uses = Uses.union([uses, *(each.uses for each in inner)])
    return Part(of, uses, names=names)


def uses_of(tokens: Sequence[Token], own: set[int]) -> Uses:
    """The names that these tokens mention, without those at the places `own`."""
    every, free, called = set[str](), set[str](), set[str]()
    words = ["", "", *(each.text for each in tokens), ""]
    for at, token in enumerate(tokens):
        if token.kind == "directive":
            found = _NAME.findall(token.text)
            for names in (every, free, called):
                names.update(found)
        elif token.kind == "name" and at not in own:
            every.add(token.text)
            before = words[at : at + 2]
            if before[1] == "template":
                before = [words[at - 1], words[at]]
            member = before[1] in (".", "->") or (before[1] == "::" and before[0] not in ("fw", ""))
            if not member:
                free.add(token.text)
                called.update([token.text] if words[at + 3] in ("(", "<") else [])
    return Uses(frozenset(every), frozenset(free), frozenset(called))
