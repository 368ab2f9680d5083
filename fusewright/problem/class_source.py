"""The source of a live model's class, as a text that stands on its own.

Of the class's file it keeps the class and the statements of the top level that it needs, such as
imports, functions, other classes and constants. The rest of the file, a training script perhaps, is
left out. A class of an installed package is imported.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from fusewright.errors import SaveError

_PROBLEM = ("get_inputs", "get_init_inputs")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_INSTALLED = ("site-packages", "dist-packages")
# Statements that change what another one has bound, if their first name is that one's.
_CHANGES = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete)


@dataclass(frozen=True)
class ClassSource:
    """The text, the class's name in it, and the file that it comes from (None for an import)."""

    text: str
    name: str
    file: Path | None


def class_source(kind: type) -> ClassSource:
    """The source of a class. SaveError if it has none that stands on its own."""
    name = kind.__qualname__
    if "<locals>" in name:
        where = f"{kind.__module__}.{name}"
        raise SaveError(f"{where} is defined inside a function: move it to the top level of a file")
    if _is_installed(kind):
        top = name.partition(".")[0]
        return ClassSource(f"from {kind.__module__} import {top}\n", name, None)
    file = _file(kind)
    source = "".join(linecache.getlines(file))
    if not source:
        raise SaveError(f"the source of the class {name} is not known: define it in a file")
    return ClassSource(_Slice(kind, file, source).text(), name, Path(file))


def _is_installed(kind: type) -> bool:
    """Whether the class belongs to Python or to an installed package, and can be imported."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ == "__main__" or file is None:
        return False
    parents, torch = Path(file).parents, sys.modules.get("torch")
    beside = [Path(torch.__file__).parents[1]] if torch and torch.__file__ else []
    known = [Path(sysconfig.get_paths()["stdlib"]), *beside]
    return any(each in known or each.name in _INSTALLED for each in parents)


def _file(kind: type) -> str:
    """The file of a class; in a notebook, the name of its cell."""
    for each in vars(kind).values():
        code = getattr(inspect.unwrap(each) if callable(each) else each, "__code__", None)
        if code is not None and code.co_qualname.startswith(f"{kind.__qualname__}."):
            return str(code.co_filename)
    try:
        return inspect.getsourcefile(kind) or ""
    except (TypeError, OSError):
        return ""


class _Slice:
    """The statements of a file that a class needs."""

    def __init__(self, kind: type, file: str, source: str) -> None:
        self._kind, self._file, self._source = kind, file, source
        self._lines = source.splitlines()
        try:
            self._body = [each for each in ast.parse(source).body if not _is_main(each)]
        except SyntaxError as error:
            raise SaveError(f"{file}: the source of {kind.__name__} is not Python") from error
        self._bound = [_bound(each) for each in self._body]
        self._used = [_globals(each) for each in self._body]

    def text(self) -> str:
        first = self._kind.__qualname__.partition(".")[0]
        classes = {each.name for each in self._body if isinstance(each, ast.ClassDef)}
        if first not in classes:
            words = f"the source of {first} is no longer there, or not at the top level"
            raise SaveError(f"{self._file}: {words}; save before the file changes")
        self._refuse_changed()
        kept = self._kept({first, *(_PROBLEM if first == "Model" else ())})
        statements = [each for at, each in enumerate(self._body) if at in kept]
        for each in statements:
            self._refuse_relative(each)
        return self._joined(statements)

    def _refuse_changed(self) -> None:
        """The kernels compute the forward that was imported. The file may say something else."""
        forward = vars(self._kind).get("forward")
        live = getattr(inspect.unwrap(forward) if callable(forward) else None, "__code__", None)
        if live is None:
            return
        if live.co_filename != self._file:
            words = f"forward of {self._kind.__name__} was replaced by a function of another file"
            raise SaveError(f"{live.co_filename}:{live.co_firstlineno}: {words}; use a subclass")
        codes = _codes(compile(self._source, self._file, "exec", dont_inherit=True))
        same = (each.co_code == live.co_code for each in codes if each.co_name == live.co_name)
        if not any(same):
            words = "this file has changed since it was imported"
            raise SaveError(f"{self._file}:{live.co_firstlineno}: {words}; start Python anew")

    def _kept(self, wanted: set[str]) -> set[int]:
        """The positions of the statements that bind or change these names, and those they need."""
        kept = {at for at, each in enumerate(self._body) if _is_always(each)}
        asked: set[str] = set()
        while wanted - asked:
            asked |= wanted
            own = {at for at, names in enumerate(self._bound) if names & asked}
            made = {
                n for at in own if not isinstance(self._body[at], _IMPORTS) for n in self._bound[at]
            }
            own |= {at for at, each in enumerate(self._body) if _first_names(each) & made & asked}
            kept |= own
            wanted = {name for at in own for name in self._used[at]}
        self._refuse_unknown(asked)
        return kept

    def _refuse_unknown(self, names: set[str]) -> None:
        """A notebook has names that other cells define."""
        known = set[str]().union(*self._bound) | set(dir(builtins))
        if any(_is_star(each) for each in self._body):
            return
        live = vars(sys.modules.get(self._kind.__module__, builtins))
        missing = sorted(name for name in names - known if name in live and name[:2] != "__")
        if missing:
            words = f"{self._kind.__name__} uses {missing[0]}, which its source does not define"
            raise SaveError(f"{self._file}: {words}; put both into one file")

    def _refuse_relative(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and node.level:
                words = "a file on its own cannot use this relative import"
                how = "write the full name of the package, or move the class into one file"
                text = ast.unparse(node)
                raise SaveError(f"{self._file}:{node.lineno}: {words}; {how}\n    {text}")

    def _joined(self, statements: Sequence[ast.stmt]) -> str:
        """The statements as they are written, with the blank lines that are usual."""
        text = ""
        before: ast.stmt | None = None
        for each in statements:
            apart = before is not None and isinstance(each, _IMPORTS) != isinstance(
                before, _IMPORTS
            )
            alone = isinstance(each, _DEFINITIONS) or isinstance(before, _DEFINITIONS)
            text += "" if before is None else "\n\n\n" if alone else "\n\n" if apart else "\n"
            text += self._segment(each)
            before = each
        return text + "\n"

    def _segment(self, statement: ast.stmt) -> str:
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(each.lineno for each in decorators)]) - 1
        last = statement.end_lineno or statement.lineno
        shared = [
            each for each in self._body if each.lineno <= last and (each.end_lineno or 0) > first
        ]
        if len(shared) > 1:  # several on one line
            return ast.get_source_segment(self._source, statement) or ast.unparse(statement)
        while first and self._lines[first - 1].startswith("#"):
            first -= 1
        return "\n".join(self._lines[first:last])


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _is_always(statement: ast.stmt) -> bool:
    future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    return future or _is_star(statement)


def _is_star(statement: ast.stmt) -> bool:
    stars = isinstance(statement, ast.ImportFrom) and [each.name for each in statement.names]
    return stars == ["*"]


def _is_main(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__"`, which does not run in an imported file."""
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of the top level binds."""
    return {each.get_name() for each in _table(statement).get_symbols() if _binds(each)}


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _globals(statement: ast.stmt) -> set[str]:
    """The global names that a statement uses, inside its functions, too."""
    top = _table(statement)
    own = {each.get_name() for each in top.get_symbols() if each.is_referenced()}
    inner = (each for table in _inside(top) for each in table.get_symbols() if each.is_global())
    return own | {each.get_name() for each in inner}


def _inside(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inside(child)


def _table(statement: ast.stmt) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(statement), "<source>", "exec")


def _first_names(statement: ast.stmt) -> set[str]:
    """The names whose values a statement may change: TABLE in `TABLE["x"] = 1`."""
    if not isinstance(statement, _CHANGES):
        return set()
    targets: Sequence[ast.expr] = getattr(statement, "targets", [])
    single = getattr(statement, "target", None) or getattr(statement, "value", None)
    roots = targets or ([single] if isinstance(single, ast.expr) else [])
    return {name for each in roots if (name := _root(each)) is not None}


def _root(expression: ast.expr) -> str | None:
    while isinstance(expression, ast.Attribute | ast.Subscript | ast.Call):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else None
