"""Long lines broken: what is inside of brackets fills lines of 100 columns.

Emission writes each statement on one line, however long. `ruff format` would give each argument of
a long call a line of its own, and wrappers and drivers would be three times as long to read. So
lines from here stand between `OFF` and `ON`, which ruff respects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

COLUMNS = 100
OFF, ON = "# fmt: off", "# fmt: on"
_CLOSING = {")": "(", "]": "[", "}": "{"}
_STRING = re.compile(r"""[rbf]*("([^"\\]|\\.)*"|'([^'\\]|\\.)*')""")
_TIGHT = re.compile(r"(?<=[\w)\]])(?:(?<!\*)\*(?!\*)|//?)(?=[\w(])")
_NAMES = r"[\w.*]+(, [\w.*]+)*,?"
_LEFT_SIDE = re.compile(rf"{_NAMES}|\[{_NAMES}\]")
# Where a line may end inside of brackets: behind a comma, or before an operator.
_BREAK = re.compile(r"(?<=,) | (?=(?:\+|or|and|if|else) )")


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, each with at most 100 columns where that is possible."""
    return [short for line in lines for short in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    if _TIGHT.search(line):
        line = _spaced(line)
    if len(line) <= COLUMNS or "\n" in line:
        return [line]
    text = line.lstrip(" ")
    if text.startswith("#"):
        return [line]
    text, indent = _enclosed(text), " " * (len(line) - len(text))
    opened, full = (list(_filled(text, indent, opens=each)) for each in (True, False))
    return full if len(full) < len(opened) and _fit(full) else opened


def _fit(lines: Iterable[str]) -> bool:
    return all(len(line) <= COLUMNS for line in lines)


def _spaced(line: str) -> str:
    """The line with spaces around its products and quotients. Sizes are written without them."""
    places = {at for at, _ in _outside_strings(line)}
    return _TIGHT.sub(
        lambda found: f" {found.group()} " if found.start() in places else found.group(), line
    )


def _enclosed(text: str) -> str:
    """The statement with parentheses around a list or condition that has none."""
    left, right = _assignment(text)
    if left and left[0] != "[" and "," in left and len(left) > COLUMNS // 2:
        left = f"({left})"
    words = [word for word in ("del ", "return ", "if ") if text.startswith(word)]
    start = words[0] if words else f"{left} = " if left else ""
    value = right if left else text.removeprefix(start)
    ends = ":" if start == "if " else ""
    value = value.removesuffix(ends)
    loose = any(len(_split(value, between)) > 1 for between in (", ", " or "))
    return start + (f"({value})" if start and loose else value) + ends


def _filled(text: str, indent: str, opens: bool) -> Iterator[str]:
    """The lines of a statement. If `opens`, its last bracket opens at the end of the first, if that
    fits; otherwise all lines are filled."""
    body = text.rstrip(":")
    # Behind the head of a function, its body must stand out.
    further = indent + ("    " if body == text else "        ")
    at = _opening(body)
    line = indent
    if opens and at is not None and len(indent) + at + 1 <= COLUMNS:
        yield indent + text[: at + 1]
        line, text = further, text[at + 1 :]
    depth = 1 if line is further else 0
    for piece in _pieces(text, depth):
        if line.strip() and len(line) + len(piece.rstrip(" ")) > COLUMNS:
            yield line.rstrip(" ")
            line = further
        line += piece
    yield line


def _pieces(text: str, depth: int) -> Iterator[str]:
    """The text in pieces, between which lines may end. It begins inside of `depth` brackets."""
    start = 0
    for at, char in _outside_strings(text):
        depth += (char in _CLOSING.values()) - (char in _CLOSING)
        if char == " " and depth > 0 and _BREAK.match(text, at):
            yield text[start : at + 1]
            start = at + 1
    yield text[start:]


def _assignment(text: str) -> tuple[str, str]:
    """The two sides of an assignment, or two empty texts."""
    left, equals, right = text.partition(" = ")
    return (left, right) if equals and _LEFT_SIDE.fullmatch(left) else ("", "")


def is_enclosed(text: str) -> bool:
    """Whether one pair of brackets encloses the whole text."""
    return _opening(text) == 0


def _opening(text: str) -> int | None:
    """Where the bracket opens that ends the text."""
    if not text or text[-1] not in _CLOSING:
        return None
    opened: list[int] = []
    for at, char in _outside_strings(text):
        if char in _CLOSING.values():
            opened.append(at)
        elif char in _CLOSING:
            start = opened.pop()
            if at == len(text) - 1:
                return start
    return None


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are in no bracket and in no string."""
    depth, start, parts = 0, 0, []
    for at, char in _outside_strings(text):
        depth += (char in _CLOSING.values()) - (char in _CLOSING)
        if depth == 0 and at >= start and text.startswith(separator, at):
            parts.append(text[start:at])
            start = at + len(separator)
    return [*parts, text[start:]]


def _outside_strings(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    while at < len(text):
        found = _STRING.match(text, at) if text[at] in "'\"" else None
        if found:
            at = found.end()
            continue
        yield at, text[at]
        at += 1
