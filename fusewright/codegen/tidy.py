"""Makes the lines of a functor's function shorter, without a change of what is compiled.

Names of indices that only stand for others go, an offset that several accesses share gets a name,
loads of the same sweeps share a test, and a loop with one statement has no braces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from fusewright.codegen.lanes import indented
from fusewright.codegen.layout import COLUMNS, call, parameters_of

# Only these have the type I. Others are int, and their products might not fit.
_ALIAS = re.compile(r" *const I (\w+) = ([qlm]|[ij]\d+);")
_OFFSET = re.compile(r"(\ba\d+(?: \+ \(|, ))([^,()]*(?:\([^()]*\)[^,()]*)*)(\)(?=[,)])|(?=[,)]))")
_TEST = re.compile(r"if constexpr \(([^()]*)\) (.*;)")
_CALL = re.compile(r"( *)([\w.:<>]+)\((.*)\);")
_NAMED = re.compile(r" *const [\w:]+ (x\d+) = (.*);")
_KEPT = re.compile(r"( *row\.x\d+\[v\] = )(x\d+);")
_SHORT = 12  # of an offset that needs no name


def tidied(lines: Sequence[str]) -> list[str]:
    """A function's body."""
    found = _with_offsets(_kept_directly(list(lines)))
    short = _plain_loops(_with_common_tests(found))
    return [line for each in short for line in _wrapped(each)]


def _wrapped(line: str) -> list[str]:
    """A call that is too long for a line."""
    found = _CALL.fullmatch(line)
    if found is None or len(line) + 4 <= COLUMNS:
        return [line]
    parts = parameters_of(found[3])
    return [found[1] + each for each in call("", found[2], parts, ";", len(found[1]) + 4)]


def without_aliases(lines: Sequence[str]) -> list[str]:
    """A function without names of indices that only stand for others."""
    lines = list(lines)
    for line in list(lines):
        found = _ALIAS.fullmatch(line)
        if found:
            lines.remove(line)
            lines = [re.sub(rf"(?<![\w.]){found[1]}\b", found[2], each) for each in lines]
    return lines


def _kept_directly(lines: list[str]) -> list[str]:
    """A value that is only kept in a member gets no name of its own."""
    made: list[str] = []
    for line in lines:
        kept = _KEPT.fullmatch(line)
        found = _NAMED.fullmatch(made[-1]) if kept and made else None
        if kept and found and found[1] == kept[2]:
            uses = re.compile(rf"(?<![\w.]){kept[2]}\b")
            if sum(len(uses.findall(each)) for each in lines) == 2:
                made[-1] = f"{kept[1]}{found[2]};"
                continue
        made.append(line)
    return made


def _with_offsets(lines: list[str]) -> list[str]:
    """Long offsets, and those that occur several times, get a name before the first use."""
    every = [(found[2], line) for line in lines for found in _OFFSET.finditer(line)]
    counts = Counter(text for text, _ in every if len(text) > _SHORT)
    long = {text for text, line in every if len(line) + 4 > COLUMNS}
    wanted = [text for text, count in counts.items() if count > 1 or text in long]
    named = {text: f"at_{number}" for number, text in enumerate(wanted)}
    made: list[str] = []
    defined: set[str] = set()
    for line in lines:
        for found in _OFFSET.finditer(line):
            if found[2] in named and found[2] not in defined:
                defined.add(found[2])
                made += _definition(named[found[2]], found[2])
        made.append(_OFFSET.sub(lambda each: _shortened(each, named), line))
    return made


def _shortened(found: re.Match[str], named: dict[str, str]) -> str:
    start, text, end = found.groups()
    name = named.get(text, text)
    if start.endswith("("):  # A single name needs no brackets.
        return f"{start[:-1]}{name}" if re.fullmatch(r"\w+", name) else f"{start}{name}{end}"
    return f"{start}{name}{end}"


def _definition(name: str, text: str) -> list[str]:
    """An offset with a name, in as many statements as it needs lines."""
    terms, lines = text.split(" + "), [f"I {name} ="]
    for at, term in enumerate(terms):
        longer = f"{lines[-1]} {'+ ' if at and lines[-1][-1] != '=' else ''}{term}"
        if len(longer) + 11 > COLUMNS:
            lines += [f"{name} += {term}"]
        else:
            lines[-1] = longer
    lines[0] = f"const {lines[0]}" if len(lines) == 1 else lines[0]
    return [f"{line};" for line in lines]


def _with_common_tests(lines: list[str]) -> list[str]:
    """Neighbouring statements with the same test share it."""
    made: list[str] = []
    for test, statements in _grouped(lines):
        short = f"if constexpr ({test}) {statements[0]}"
        if not test:
            made += statements
        elif len(statements) == 1 and len(short) + 4 <= COLUMNS:
            made.append(short)
        else:
            made += [f"if constexpr ({test}) {{", *indented(statements), "}"]
    return made


def _grouped(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    test, held = "", list[str]()
    for line in lines:
        found = _TEST.fullmatch(line)
        now, statement = (found[1], found[2]) if found else ("", line)
        if now != test and held:
            yield test, held
            held = []
        test = now
        held.append(statement)
    if held:
        yield test, held


def _plain_loops(lines: list[str]) -> list[str]:
    """A loop over lanes with one statement, without braces."""
    made: list[str] = []
    for line in lines:
        made.append(line)
        if line.strip() != "}" or len(made) < 3:
            continue
        head, body = made[-3], made[-2]
        indent = len(head) - len(head.lstrip())
        whole = f"{head[:-2]} {body.strip()}"
        loop = head.lstrip() == "FW_LANES(v, V, n) {" and body.startswith(" " * (indent + 2))
        simple = body.endswith(";") and not body.strip().startswith(("if ", "const "))
        if loop and simple and body[indent + 2] != " " and len(whole) + 4 <= COLUMNS:
            made[-3:] = [whole]
    return made
