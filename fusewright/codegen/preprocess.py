"""Our headers before they are pruned: without comments, and with conditions resolved.

A text is for one language, so `#if defined(__CUDACC__)` is decided here. Conditions that only the
compiler knows, such as the instructions of a processor, stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_COMMENT_OR_QUOTED = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'")
# Text between such lines is in a form of its own.
FORMAT = re.compile(r"// clang-format (off|on)$")
_CONDITIONAL = re.compile(r"\s*#(if|ifdef|ifndef|elif|else|endif)\b\s*(.*)")
_DEFINED = re.compile(r"(!?)\s*defined\((\w+)\)")


def without_comments(lines: Iterable[str]) -> list[str]:
    """The lines of code. A line that is only a comment goes, unless it is for clang-format."""
    kept = []
    for line in lines:
        code = _COMMENT_OR_QUOTED.sub(_quoted, line)
        if FORMAT.match(line):
            kept.append(line)
        elif code == line or code.strip():
            kept.append(code.rstrip())
    return kept


def _quoted(found: re.Match[str]) -> str:
    return "" if found.group().startswith("//") else found.group()


@dataclass
class _Condition:
    """An open conditional. If it `is_known`, its directives go and only the `active` branch stays.
    `done` says that a branch was taken, so that the others are not."""

    is_known: bool
    active: bool
    done: bool = False


def resolved(lines: Iterable[str], known: Mapping[str, bool]) -> list[str]:
    """The lines that are compiled if these macros are defined or not. Other conditions stay."""
    kept: list[str] = []
    open_: list[_Condition] = []
    for line in lines:
        found = _CONDITIONAL.match(line)
        directive = [line] if found is None else _directive(found[1], found[2], line, open_, known)
        if all(each.active for each in open_):
            kept += directive
    return kept


def _directive(
    word: str, rest: str, line: str, open_: list[_Condition], known: Mapping[str, bool]
) -> list[str]:
    """What stays of a directive. `open_` is changed to the conditions behind it."""
    if word.startswith("if"):
        meant = {"if": rest, "ifdef": f"defined({rest})", "ifndef": f"!defined({rest})"}[word]
        value = _value(meant, known)
        open_.append(_Condition(value is not None, value is not False, bool(value)))
        return [] if value is not None else [line]
    if word == "endif":
        return [] if open_.pop().is_known else [line]
    now = open_[-1]
    if not now.is_known:
        return [line]
    value = False if now.done else _value(rest, known) if word == "elif" else True
    if value is None:  # The branches before are not taken: this one begins a condition.
        open_[-1] = _Condition(is_known=False, active=True)
        return [f"#if {rest}"]
    now.active, now.done = value, now.done or value
    return []


def _value(expression: str, known: Mapping[str, bool]) -> bool | None:
    """Whether an expression holds, or None if it is not known."""
    values: list[bool | None] = []
    for part in expression.split("&&"):
        found = _DEFINED.fullmatch(part.strip())
        value = known.get(found[2]) if found else None
        values.append(None if found is None or value is None else value != bool(found[1]))
    if False in values:
        return False
    return None if None in values else True
