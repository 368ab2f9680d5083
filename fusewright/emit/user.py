"""The user's source as the emitted file contains it.

`from __future__` statements are taken out, because they must come first. All other code stays.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.emit.edits import Edit, edited, lines_of, span
from fusewright.errors import ProblemError

_AFTER = re.compile(r"[ \t\f]*;(?:[ \t\f]|\\\n)*")


@dataclass(frozen=True)
class UserSource:
    """`from __future__` lines, the rest of the source, and the names that the source uses.

    `bound` are names that its top level binds, except to the module of the same name.
    """

    future: tuple[str, ...]
    rest: str
    names: frozenset[str]
    bound: frozenset[str]


def read(source: str) -> UserSource:
    """Divide the user's source."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ProblemError(f"the model's source is not Python: {error}") from error
    lines = lines_of(source)
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    future = [node for node in imports if node.module == "__future__"]
    edits = [_without(node, lines) for node in future]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound = frozenset(name for node in tree.body for name in _bound(node))
    return UserSource(
        tuple(map(ast.unparse, future)), edited(lines, edits), frozenset(names) | bound, bound
    )


def _without(statement: ast.stmt, lines: Sequence[str]) -> Edit:
    """Remove the statement, and the semicolon after it."""
    start, (last, column) = span(statement, lines)
    following = "".join(lines[last - 1 :])[column:]
    semicolon = _AFTER.match(following)
    if semicolon is None:
        return Edit(start, (last, column), "", "")
    crossed = semicolon.group().split("\n")
    ended = column + len(crossed[0]) if len(crossed) == 1 else len(crossed[-1])
    return Edit(start, (last + len(crossed) - 1, ended), "", "")


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement binds, except those of `import name`."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            pairs = [(alias.asname or alias.name, alias) for alias in aliases]
            direct = isinstance(statement, ast.Import)
            return {name for name, alias in pairs if not (direct and alias.asname is None)}
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}
