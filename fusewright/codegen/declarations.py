"""Splits C++ text of ours into the declarations of a scope, with the names that each one declares.

This is no parser of C++: it knows what our headers contain, which clang-format has formatted. The
text has no comments (`preprocess`). What a scope contains: directives, namespaces, macros that
declare something, functions, variables, types and their members.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_TOKEN = re.compile(
    r"(?P<directive>^[ \t]*#(?:[^\\\n]|\\\n|\\.)*|^// clang-format (?:on|off)$)"
    r"|(?P<quoted>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)"
    r"|(?P<sign>::|->|##|[^\s\w])",
    re.MULTILINE,
)
_DEFINE = re.compile(r"\s*#define (\w+)(?:\(([^)]*)\))?")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_TYPES = ("struct", "class", "union", "enum")
# Words with parentheses that are no parameters.
_ATTRIBUTES = ("__launch_bounds__", "__attribute__", "alignas", "__align__", "decltype")
_WORDS = frozenset(
    """
    const constexpr inline static extern auto void int float double bool char unsigned signed long
    short volatile typename explicit friend __device__ __host__ __global__ __forceinline__ FW_FN
    """.split()
)


Macro = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Declaration:
    """`kind` is one of directive, namespace, end, access, macro, function, variable, alias, type
    and other. `names` are declared. `parameters` and `body` are ranges of tokens: the parameters of
    a function, or the arguments of a specialisation, and the text in a type's braces. `gap` says
    that there is an empty line before it, and `indent` is its indentation."""

    kind: str
    text: str
    tokens: tuple[Token, ...]
    names: tuple[str, ...] = ()
    gap: bool = False
    parameters: tuple[int, int] = (0, 0)
    body: tuple[int, int] = (0, 0)
    indent: int = 0


def tokens_of(text: str) -> list[Token]:
    return [
        Token(str(found.lastgroup), found.group(), found.start(), found.end())
        for found in _TOKEN.finditer(text)
    ]


def macro_of(text: str) -> tuple[str, Macro] | None:
    """The macro with parameters that a directive defines: its name, parameters and text."""
    found = _DEFINE.match(text)
    if found is None or found[2] is None:
        return None
    parameters = tuple(each.strip() for each in found[2].split(","))
    return found[1], (parameters, text[found.end() :].replace("\\\n", "\n"))


def expanded(macro: Macro, tokens: Sequence[Token]) -> str:
    """What a use of a macro stands for. The tokens are the macro's name and its arguments."""
    arguments, depth = [""], 0
    for token in tokens[2:-1]:
        depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        if token.text == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += f" {token.text}"
    given = dict(zip(macro[0], (each.strip() for each in arguments), strict=False))
    words = [given.get(token.text, token.text) for token in tokens_of(macro[1])]
    return " ".join(words).replace(" ## ", "")


def declarations(text: str, tokens: Sequence[Token]) -> list[Declaration]:
    """The declarations of one scope, in order."""
    found: list[Declaration] = []
    at, before = 0, tokens[0].start if tokens else 0
    while at < len(tokens):
        end, kind = _extent(tokens, at)
        first, last = tokens[at], tokens[end - 1]
        part = tuple(tokens[at:end])
        gap = text.count("\n", before, first.start) > 1
        made = _declaration(kind, text[first.start : last.end], part, gap)
        indent = first.start - (text.rfind("\n", 0, first.start) + 1)
        found.append(replace(made, indent=indent))
        at, before = end, last.end
    return found


def _extent(tokens: Sequence[Token], at: int) -> tuple[int, str]:
    """The end of the declaration that begins here, and its kind as far as that is known."""
    first = tokens[at]
    follows = tokens[at + 1].text if at + 1 < len(tokens) else ""
    if first.kind == "directive":
        return at + 1, "directive"
    if first.text == "}":
        return at + 1, "end"
    if first.text == "namespace":
        return next(i for i in range(at, len(tokens)) if tokens[i].text == "{") + 1, "namespace"
    if first.text in ("public", "private", "protected") and follows == ":":
        return at + 2, "access"
    if first.text.startswith("FW_") and follows == "(":
        return closed(tokens, at + 1), "macro"
    return _end(tokens, at), ""


def _end(tokens: Sequence[Token], at: int) -> int:
    """Behind the semicolon or the body of the declaration that begins here."""
    has_type = assigned = False
    while tokens[at].text != ";":
        text = tokens[at].text
        if text == "template" and tokens[at + 1].text == "<":
            at = closed_angle(tokens, at + 1)
            continue
        if text == "operator":  # Its sign may be = or the like.
            at = next(i for i in range(at + 2, len(tokens)) if tokens[i].text == "(")
            continue
        has_type |= text in _TYPES
        assigned |= text == "="
        if text in _CLOSING:
            at = closed(tokens, at)
            behind = tokens[at].text if at < len(tokens) else ""
            # A type, a value in braces and a member's initializer are no bodies.
            if text == "{" and not (has_type or assigned or behind in (",", "{")):
                return at + (behind == ";")
            continue
        at += 1
    return at + 1


def closed(tokens: Sequence[Token], at: int) -> int:
    """Behind the bracket that closes the one here."""
    depth = 0
    while True:
        text = tokens[at].text
        depth += (text in _CLOSING) - (text in _CLOSING.values())
        at += 1
        if depth == 0:
            return at


def closed_angle(tokens: Sequence[Token], at: int) -> int:
    """Behind the > that closes the < here."""
    depth = 0
    while True:
        text = tokens[at].text
        if text in _CLOSING:
            at = closed(tokens, at)
            continue
        depth += (text == "<") - (text == ">")
        at += 1
        if depth == 0:
            return at


def _declaration(kind: str, text: str, tokens: tuple[Token, ...], gap: bool) -> Declaration:
    if kind:
        defined = _DEFINE.match(text) if kind == "directive" else None
        return Declaration(kind, text, tokens, (defined[1],) if defined else (), gap)
    at = 0
    while tokens[at].text == "template":
        at = closed_angle(tokens, at + 1)
    word = tokens[at].text
    if word == "extern" and tokens[at + 1].kind == "quoted" and tokens[at + 2].text == "{":
        return Declaration("other", text, tokens, gap=gap)
    if word == "static_assert":
        return Declaration("other", text, tokens, gap=gap)
    if word == "using":
        alias = tokens[at + 2].text == "="
        names = (tokens[at + 1].text,) if alias else ()
        return Declaration("alias" if alias else "other", text, tokens, names, gap)
    if word in _TYPES:
        return _type(text, tokens, at, gap)
    return _function_or_variable(text, tokens, at, gap)


def _type(text: str, tokens: tuple[Token, ...], at: int, gap: bool) -> Declaration:
    is_enum = tokens[at].text == "enum"
    while tokens[at].text in (*_TYPES, *_ATTRIBUTES):
        at = closed(tokens, at + 1) if tokens[at].text in _ATTRIBUTES else at + 1
    if tokens[at].text == "{":  # without a name
        return Declaration("other", text, tokens, gap=gap)
    name, first = tokens[at].text, at + 1
    braces = [i for i in range(first, len(tokens)) if tokens[i].text == "{"]
    braces = [] if is_enum else braces
    body = (braces[0] + 1, closed(tokens, braces[0]) - 1) if braces else (0, 0)
    # What a specialisation is for counts as its parameters.
    special = (first, closed_angle(tokens, first)) if tokens[first].text == "<" else (0, 0)
    return Declaration("type", text, tokens, (name,), gap, special, body)


def _function_or_variable(text: str, tokens: tuple[Token, ...], at: int, gap: bool) -> Declaration:
    name = ""
    while tokens[at].text not in ("(", "=", ";", "{", "[", ","):
        token = tokens[at]
        if token.text == "operator":
            return Declaration("other", text, tokens, gap=gap)
        if token.text in _ATTRIBUTES:
            at = closed(tokens, at + 1)
        elif token.text == "<":
            at = closed_angle(tokens, at)
        else:
            name = token.text if token.kind == "name" and token.text not in _WORDS else name
            at += 1
    if tokens[at].text == "(":
        parameters = at, closed(tokens, at)
        return Declaration("function", text, tokens, (name,), gap, parameters)
    return Declaration("variable", text, tokens, (name, *_further(tokens, at)), gap)


def _further(tokens: Sequence[Token], at: int) -> Iterator[str]:
    """The other names of a declaration of several variables."""
    while tokens[at].text != ";":
        if tokens[at].text in _CLOSING:
            at = closed(tokens, at)
            continue
        if tokens[at].text == "," and tokens[at + 1].kind == "name":
            yield tokens[at + 1].text
        at += 1
