"""Long lines broken as `ruff format` breaks them.

Emission writes each statement on one line, however long. `wrapped` breaks a line at its last
bracket: the items go on one line of their own if they fit (arguments only), else on a line each.
It knows the statements that we write, not all of Python. A test compares it with ruff.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

COLUMNS = 100
_CLOSING = {")": "(", "]": "[", "}": "{"}
_STRING = re.compile(r"""[rbf]*("([^"\\]|\\.)*"|'([^'\\]|\\.)*')""")
_TIGHT = re.compile(r"(?<=[\w)\]])(?:(?<!\*)\*(?!\*)|//?)(?=[\w(])")
_NAMES = r"[\w.*]+(, [\w.*]+)*,?"
_LEFT_SIDE = re.compile(rf"{_NAMES}|\[{_NAMES}\]")


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
    return list(_statement(text, " " * (len(line) - len(text))))


def _spaced(line: str) -> str:
    """The line with spaces around its products and quotients. Sizes are written without them."""
    places = {at for at, _ in _outside_strings(line)}
    return _TIGHT.sub(
        lambda found: f" {found.group()} " if found.start() in places else found.group(), line
    )


def _statement(text: str, indent: str, inside: bool = False) -> Iterator[str]:
    """One statement. An item `inside` a bracket counts as one, too, with its comma."""
    if len(indent) + len(text) <= COLUMNS:
        yield indent + text
        return
    left, right = _assignment(text)
    if "," in left and not _fits_head(left, right, indent):
        start, close = ("[", "]") if left[0] == "[" else ("(", ")")
        yield from _exploded(indent + start, left.strip("[],").split(", "), indent)
        yield from _statement(f"{close} = {right}", indent)
        return
    for word in ("del ", "return ", f"{left} = " if left else "del "):
        rest = text.removeprefix(word)
        if rest != text and (" or " in rest or "," in rest) and _opening(rest) != 0:
            names, between = _split(rest, ", "), ","
            if len(names) == 1:
                names, between = _split(rest, " or "), ""
            if len(names) > 1:
                yield from _loose(f"{indent}{word}(", names, between, indent)
                return
    terms = _split(text.rstrip(","), " + ")
    if inside and len(terms) > 1 and len(_split(text, " if ")) == 1:
        last = terms.pop() + "," * text.endswith(",")
        yield indent + terms[0]
        for term in (*terms[1:], last):
            yield from _statement(f"+ {term}", indent, inside)
        return
    yield from _broken(text, indent)


def _fits_head(left: str, right: str, indent: str) -> bool:
    """Whether the line with the targets ends at the value's bracket."""
    at = _opening(right)
    return at is not None and len(indent) + len(left) + 3 + at + 1 <= COLUMNS


def _loose(start: str, names: list[str], between: str, indent: str) -> Iterator[str]:
    """A tuple or a condition that gets its own parentheses."""
    if between:
        yield from _exploded(start, names, indent)
        yield f"{indent})"
        return
    yield start
    yield from (f"{indent}    {'or ' if at else ''}{name}" for at, name in enumerate(names))
    yield f"{indent})"


def _broken(text: str, indent: str) -> Iterator[str]:
    """A line that ends with a bracket, before a colon or comma perhaps, broken inside it."""
    end = re.search(r"[:,]*$", text)
    tail = end.group() if end else ""
    body = text.removesuffix(tail)
    at = _opening(body)
    if at is None:
        yield from _conditional(text, indent)
        return
    items = _split(body[at + 1 : -1], ", ")
    items = [each for each in items if each]
    joined = ", ".join(items)
    takes_arguments = at > 0 and (body[at - 1].isalnum() or body[at - 1] in "_)]")
    # A comma would make a tuple of parentheses that only group.
    groups = body[at] == "(" and len(items) == 1 and not items[0].endswith(",")
    if takes_arguments and len(indent) + 4 + len(joined) <= COLUMNS:
        yield from (indent + body[: at + 1], f"{indent}    {joined}")
    elif groups or (len(items) == 1 and takes_arguments):
        yield indent + body[: at + 1]
        yield from _statement(items[0], indent + "    ", inside=True)
    else:
        yield from _exploded(indent + body[: at + 1], items, indent)
    yield f"{indent}{body[-1]}{tail}"


def _exploded(start: str, items: Iterable[str], indent: str) -> Iterator[str]:
    yield start
    for item in items:
        yield from _statement(f"{item.rstrip(',')},", indent + "    ", inside=True)


def _conditional(text: str, indent: str) -> Iterator[str]:
    """`a if b else c` on three lines."""
    masked = _STRING.sub(lambda string: "_" * len(string.group()), text)
    found = re.fullmatch(r"(.*) (if .*) (else .*)", masked)
    spans = [found.span(part) for part in (1, 2, 3)] if found else [(0, len(text))]
    yield from (indent + text[start:end] for start, end in spans)


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
            start = opened.pop() if opened else None  # one that closes an earlier line's
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
