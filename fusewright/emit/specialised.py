"""The run time's text for one file: without branches that none of its modes takes.

`facts` are fields of `mode` that have the same value in all modes of the file. Tests of them are
decided here: `if mode.states is not None:` goes where no mode has states. What is left keeps ruff's
format.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from fusewright.emit.edits import Edit, Spot, edited, lines_of, outermost, span
from fusewright.emit.wrap import COLUMNS

# A value of which only this is known: it is true, and not None.
TRUE = object()
_UNKNOWN = object()
_BRANCHES = (ast.If, ast.For, ast.While, ast.With, ast.Try)
_CLOSING = (")", "]", "}")


def specialised(text: str, facts: Mapping[str, object]) -> str:
    """A module's text without what these facts decide."""
    if not facts:
        return text
    while True:
        lines = lines_of(text)
        nodes = [*ast.walk(ast.parse(text))]
        suites = [getattr(node, name, None) for node in nodes for name in ("body", "orelse")]
        alone = [each[0] for each in suites if isinstance(each, list) and len(each) == 1]
        found = [(node, edit) for node in nodes for edit in _edits(node, lines, facts)]
        # A suite does not get empty.
        edits = [edit for node, edit in found if edit.text or node not in alone]
        if not edits:
            return _joined(text)
        text = edited([*lines, ""], outermost(edits))


def _value(node: ast.expr, facts: Mapping[str, object]) -> object:
    """The value of a test, or _UNKNOWN."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Attribute(value=ast.Name(id="mode"), attr=name):
            return facts.get(name, _UNKNOWN)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _value(operand, facts)
            return _UNKNOWN if value is _UNKNOWN else not value
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]
        ):
            value = _value(left, facts)
            is_none = value is None
            return _UNKNOWN if value is _UNKNOWN else is_none == isinstance(op, ast.Is)
        case ast.BoolOp(op=op, values=operands):
            values = [_value(each, facts) for each in operands]
            decisive = isinstance(op, ast.Or)
            if any(each is not _UNKNOWN and bool(each) == decisive for each in values):
                return decisive
            return _UNKNOWN if _UNKNOWN in values else not decisive
    return _UNKNOWN


def _edits(node: ast.AST, lines: Sequence[str], facts: Mapping[str, object]) -> Iterator[Edit]:
    """What becomes of one node; edits inside of others are made later."""
    match node:
        case ast.If(test=test):
            value = _value(test, facts)
            if value is not _UNKNOWN:
                yield _decided(node, bool(value), lines)
        case ast.For(iter=items) if _value(items, facts) == ():
            yield _lines(node.lineno, _end(node))
        case ast.Assert(test=test) if _value(test, facts) not in (_UNKNOWN, False):
            yield _lines(node.lineno, _end(node))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            value = _value(test, facts)
            if value is not _UNKNOWN:
                yield _replaced(node, _source(body if value else orelse, lines), lines)
        case ast.BoolOp():
            yield from _shorter(node, lines, facts)


def _decided(node: ast.If, holds: bool, lines: Sequence[str]) -> Edit:
    """The branch that is taken instead of the statement."""
    is_elif = lines[node.lineno - 1].lstrip().startswith("elif ")
    kept = node.body if holds else node.orelse
    if not kept:
        return _lines(node.lineno, _end(node))
    begins, ends = kept[0].lineno, _end(kept[-1])
    text = lines[begins - 1 : ends]
    if not holds and text[0].lstrip().startswith("elif "):
        text = [text[0] if is_elif else text[0].replace("elif ", "if ", 1), *text[1:]]
    elif is_elif:
        indent = " " * (len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip()))
        text = [f"{indent}else:\n", *text]
    else:
        text = [line.removeprefix("    ") for line in text]
    return Edit((node.lineno, 0), (_end(node) + 1, 0), "", "".join(text))


def _shorter(node: ast.BoolOp, lines: Sequence[str], facts: Mapping[str, object]) -> Iterator[Edit]:
    """Without operands that decide nothing; the last one may be the value and stays."""
    word = "and" if isinstance(node.op, ast.And) else "or"
    neutral = [_value(each, facts) for each in node.values]
    drop = [v is not _UNKNOWN and bool(v) == (word == "and") for v in neutral]
    decided = [v is not _UNKNOWN and bool(v) != (word == "and") for v in neutral]
    if all(drop) or any(decided):
        return
    first = drop.index(False)
    start, end = span(node, lines)
    words = [_between(*pair, word, lines) for pair in pairwise(node.values)]
    if first:
        yield Edit(start, words[first - 1][1], "", "")
    for at in range(first + 1, len(drop)):
        if drop[at]:
            yield Edit(words[at - 1][0], words[at][0] if at < len(words) else end, "", "")


def _between(left: ast.expr, right: ast.expr, word: str, lines: Sequence[str]) -> tuple[Spot, Spot]:
    """Where the first operand's text ends and the second's begins, brackets included."""
    (row, column), (last, _) = span(left, lines)[1], span(right, lines)[0]
    found = None
    while row <= last and not (found := re.compile(rf"\b{word}\b").search(lines[row - 1], column)):
        row, column = row + 1, 0
    assert found is not None
    before, after = lines[row - 1][: found.start()].rstrip(), lines[row - 1][found.end() :]
    begins = (row, len(before)) if before else (row - 1, len(lines[row - 2].rstrip()))
    return begins, (row, found.end() + len(after) - len(after.lstrip()))


def _replaced(node: ast.expr, text: str, lines: Sequence[str]) -> Edit:
    start, end = span(node, lines)
    return Edit(start, end, "", text)


def _source(node: ast.expr, lines: Sequence[str]) -> str:
    (first, start), (last, end) = span(node, lines)
    if first == last:
        return lines[first - 1][start:end]
    return "".join([lines[first - 1][start:], *lines[first : last - 1], lines[last - 1][:end]])


def _lines(first: int, last: int) -> Edit:
    return Edit((first, 0), (last + 1, 0), "", "")


def _end(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _joined(text: str) -> str:
    """Statements that fit on one line now, as ruff would write them."""
    lines = lines_of(text)
    edits = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt) or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        last = node.body[0].lineno - 1 if isinstance(node, _BRANCHES) else _end(node)
        whole = _on_one_line(lines[node.lineno - 1 : last])
        if whole:
            edits.append(Edit((node.lineno, 0), (last + 1, 0), "", whole))
    return edited([*lines, ""], edits)


def _on_one_line(lines: Sequence[str]) -> str:
    """The lines as one, or nothing if ruff keeps them apart."""
    parts = [line.strip() for line in lines]
    trailing = any(a.endswith(",") and b.startswith(_CLOSING) for a, b in pairwise(parts))
    if len(parts) < 2 or trailing or any('"""' in part for part in parts):
        return ""
    if any(a.endswith('"') and re.match('f?"', b) for a, b in pairwise(parts)):
        return ""  # a text in parts
    whole = lines[0].rstrip()
    for part in parts[1:]:
        close = whole.endswith(("(", "[", "{")) or part.startswith(_CLOSING)
        whole += part if close else f" {part}"
    return whole + "\n" if len(whole) <= COLUMNS else ""
