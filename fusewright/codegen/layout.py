"""Line breaks as clang-format makes them, for the few kinds of text that can be too long."""

from __future__ import annotations

from collections.abc import Sequence

COLUMNS = 100
INDENT = 4  # of a line that goes on


def parameters_of(text: str) -> list[str]:
    """The parts between the commas of a list that are in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [each.strip() for each in parts if each.strip()]


def declaration(before: str, signature: str, after: str, indent: int = 2) -> list[str]:
    """A function's first lines, with its bracket. The text will be indented by `indent`."""
    name, _, rest = signature.partition("(")
    parts, room = parameters_of(rest[:-1]), COLUMNS - indent
    ways = _calls(before, name, parts, f"{after} {{", room)
    return min(ways, key=lambda each: _cost(each, room, below=34))


def call(before: str, name: str, parts: Sequence[str], after: str, indent: int) -> list[str]:
    """A call with these arguments. If it is too long, the arguments are aligned behind the bracket,
    or begin on the next line if that takes fewer lines."""
    room = COLUMNS - indent
    return min(_calls(before, name, parts, after, room), key=lambda each: _cost(each, room))


def assignment(left: str, name: str, parts: Sequence[str], indent: int) -> list[str]:
    """A definition whose right side is a call. If it is too long, it may also break behind the sign
    of assignment, which is better than between two arguments."""
    room = COLUMNS - indent
    whole = _calls(f"{left} = ", name, parts, ";", room)
    below = [
        [f"{left} =", *(" " * INDENT + line for line in each)]
        for each in _calls("", name, parts, ";", room - INDENT)
    ]
    return min([*whole, *below], key=lambda each: _cost(each, room))


def definition(left: str, right: str, indent: int = 2) -> list[str]:
    """A definition of any other kind. If it is too long, it breaks behind the sign."""
    short = f"{left} = {right};"
    if len(short) + indent <= COLUMNS:
        return [short]
    return [f"{left} =", f"{' ' * INDENT}{right};"]


def _calls(before: str, name: str, parts: Sequence[str], after: str, room: int) -> list[list[str]]:
    """A call with its arguments aligned, and with all of them below."""
    first, last = f"{before}{name}(", f"){after}"
    below = filled(" " * INDENT, parts, last, room)
    return [filled(first, parts, last, room), [first, *below]]


def _cost(lines: Sequence[str], room: int, below: int = 11) -> int:
    """What clang-format thinks of these line breaks. A break behind a bracket is `below`."""
    too_long = sum(max(0, len(line) - room) for line in lines)
    breaks = {"=": 4, "(": below}
    return too_long * 1000 + sum(breaks.get(line[-1], 10) for line in lines[:-1])


def filled(first: str, parts: Sequence[str], last: str, room: int) -> list[str]:
    """The parts behind `first`, as many on each line as fit, aligned with each other."""
    if not parts:
        return [first + last]
    lines, started = [first], False
    for at, part in enumerate(parts):
        end = last if at == len(parts) - 1 else ","
        gap = " " if started else ""
        if not started or len(lines[-1]) + len(gap) + len(part) + len(end) <= room:
            lines[-1] += f"{gap}{part}{end}"
        else:
            lines.append(" " * len(first) + part + end)
        started = True
    return lines
