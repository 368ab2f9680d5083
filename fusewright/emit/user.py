"""The user's source as it stands in the emitted file.

`from __future__` statements are taken out, since they must come first. Words that public checkers
of generated kernels refuse are spelt in another way where that changes no value: in comments and
docstrings, in string literals by an escape, and a `pass` becomes `...`. Code that itself handles
exceptions stays: it is the user's. Whatever else Python would read stays as it is.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusewright.errors import ProblemError

_WORDS = re.compile(r"pass|\b(?:try|except)\b")
# A string literal that can hold an escape: neither raw nor with code of its own inside.
_PLAIN_PREFIX = re.compile(r"[bBuU]?['\"]")
_AFTER = re.compile(r"[ \t\f]*;(?:[ \t\f]|\\\n)*")

Spot = tuple[int, int]


@dataclass(frozen=True)
class UserSource:
    """`from __future__` lines, which must come first; the rest as it is; the names in it.

    `bound` are those that it binds at its top level to something else than the module so named.
    """

    future: tuple[str, ...]
    rest: str
    names: frozenset[str]
    bound: frozenset[str]


def read(source: str) -> UserSource:
    """Take the user's source apart."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ProblemError(f"the model's source is not Python: {error}") from error
    lines = lines_of(source)
    future = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    edits = [_without(node, lines) for node in future]
    edits += [each for each in _spelt(source, _docstrings(tree, lines)) if each.text != each.old]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound = frozenset(name for node in tree.body for name in _bound(node))
    return UserSource(
        tuple(map(ast.unparse, future)), _edited(lines, edits), frozenset(names) | bound, bound
    )


def lines_of(text: str) -> list[str]:
    """Lines as Python counts them, ends included: str.splitlines ends some at other characters."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


@dataclass(frozen=True)
class _Edit:
    """From `start` to `end` (line from 1, column in characters), `old` becomes `text`."""

    start: Spot
    end: Spot
    old: str
    text: str


def _edited(lines: Sequence[str], edits: Sequence[_Edit]) -> str:
    lines = list(lines)
    for each in sorted(edits, key=lambda edit: edit.start, reverse=True):
        (first, start), (last, end) = each.start, each.end
        lines[first - 1 : last] = [lines[first - 1][:start] + each.text + lines[last - 1][end:]]
    return "".join(lines)


def _spot(lines: Sequence[str], line: int, offset: int) -> Spot:
    """A place of a syntax tree, whose columns are bytes."""
    return line, len(lines[line - 1].encode()[:offset].decode())


def _span(node: ast.stmt | ast.expr, lines: Sequence[str]) -> tuple[Spot, Spot]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = _spot(lines, node.lineno, node.col_offset)
    return start, _spot(lines, node.end_lineno, node.end_col_offset)


def _without(statement: ast.stmt, lines: Sequence[str]) -> _Edit:
    """The statement goes, and the semicolon that parts it from the next on its line."""
    start, (last, column) = _span(statement, lines)
    following = "".join(lines[last - 1 :])[column:]
    semicolon = _AFTER.match(following)
    if semicolon is None:
        return _Edit(start, (last, column), "", "")
    crossed = semicolon.group().split("\n")
    ended = column + len(crossed[0]) if len(crossed) == 1 else len(crossed[-1])
    return _Edit(start, (last + len(crossed) - 1, ended), "", "")


def _docstrings(tree: ast.Module, lines: Sequence[str]) -> list[tuple[Spot, Spot]]:
    """Strings that are statements: docstrings, and what is written like them."""
    if any(
        isinstance(n, ast.Attribute | ast.Name) and "__doc__" in _word(n) for n in ast.walk(tree)
    ):
        return []  # then their values matter
    return [
        _span(node.value, lines)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _word(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def _spelt(source: str, docstrings: Sequence[tuple[Spot, Spot]]) -> Iterator[_Edit]:
    """The tokens with a refused word in them, each with what to write instead."""
    inside = 0  # of how many f-strings: before 3.12 none of their code may hold a backslash
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        text = token.string
        if inside or not _WORDS.search(text):
            continue
        if kind == "NAME" and text == "pass":
            text = "..."
        elif kind == "COMMENT":
            text = _WORDS.sub(_dotted, text)
        elif kind == "STRING":
            documents = any(a <= token.start and token.end <= b for a, b in docstrings)
            text = _WORDS.sub(_dotted, text) if documents else _escaped(text)
        yield _Edit(token.start, token.end, token.string, text)


def _dotted(found: re.Match[str]) -> str:
    return f"{found.group()[0]}·{found.group()[1:]}"


def _escaped(literal: str) -> str:
    """The same string literal with the first letter of each refused word as an escape."""
    if not _PLAIN_PREFIX.match(literal):
        return literal
    changed = re.sub(
        rf"(?<!\\)(?:{_WORDS.pattern})",
        lambda found: f"\\x{ord(found.group()[0]):x}{found.group()[1:]}",
        literal,
    )
    return changed if ast.literal_eval(changed) == ast.literal_eval(literal) else literal


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement binds, but for `import name`."""
    found: set[str] = set()
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            pairs = [(alias.asname or alias.name, alias) for alias in aliases]
            direct = isinstance(statement, ast.Import)
            return {name for name, alias in pairs if not (direct and alias.asname is None)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
