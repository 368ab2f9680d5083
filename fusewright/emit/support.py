"""The run time as an emitted file contains it: only the functions that the file uses.

The text of `fusewright.runtime` is pasted without docstrings, comments and annotations: these are
for the developers of the run time, and its tests run it as it is written there.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from fusewright.emit.edits import Edit, Spot, edited, lines_of, outermost, span, spot
from fusewright.emit.specialised import specialised

_BLANKS = re.compile(r"\n(?:[ \t]*\n)+")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Item:
    """A statement at the top level of a run-time module: the names that it defines and uses."""

    names: frozenset[str]
    uses: frozenset[str]
    text: str
    is_import: bool = False


def pasted(
    modules: Iterable[str], used: str, facts: Mapping[str, object] | None = None
) -> tuple[list[str], list[str]]:
    """The import lines and the definitions that a text needs, in the order of the modules. `facts`
    are what all modes have in common: see `specialised`."""
    items = [item for name in modules for item in _items(name, tuple((facts or {}).items()))]
    needed = frozenset(_WORD.findall(used))
    kept = _reached(items, needed)
    while (shorter := _without_members(kept, used)) != kept:
        kept = _reached(shorter, needed)
    imports = sorted({item.text for item in kept if item.is_import})
    return imports, [item.text for item in kept if not item.is_import]


def _reached(items: Sequence[Item], needed: frozenset[str]) -> list[Item]:
    """The statements that define these names, and what they need themselves."""
    kept: set[Item] = set()
    homes = {name: item for item in items for name in item.names}
    frontier = [homes[name] for name in needed if name in homes]
    while frontier:
        item = frontier.pop()
        if item not in kept:
            kept.add(item)
            frontier += [homes[name] for name in item.uses if name in homes]
    return [item for item in dict.fromkeys(items) if item in kept]


_METHOD = re.compile(r"\n*^    def ([a-z]\w*)\(self.*\n(?:(?: {8}.*)?\n)*", re.MULTILINE)


_PLAIN_CLASS = re.compile(r"class \w+:")  # others' fields may be read by their bases
_FIELD = re.compile(r"^    ([a-z]\w*) = .*\n", re.MULTILINE)


def _without_members(items: Sequence[Item], used: str) -> list[Item]:
    """The definitions without methods that nothing calls, and fields that nothing reads."""
    made = list(items)
    for at, item in enumerate(items):
        text = item.text + "\n" if item.text.startswith("class ") else ""
        for found in reversed([*_METHOD.finditer(text)]):
            own = text.replace(found.group(), "")
            others = (each.text for each in made if each is not item)
            if not _reads((used, own, *others), found[1]):
                text = text[: found.start()] + "\n\n" + text[found.end() :]
        plain = _FIELD.finditer(text) if _PLAIN_CLASS.match(text) else ()
        for found in reversed([*plain]):
            if not _reads((used, *(each.text for each in made)), found[1]):
                text = text[: found.start()] + text[found.end() :]
        text = re.sub(r"\n{3,}", "\n\n", text).rstrip("\n")
        if text and text != item.text:
            made[at] = next(iter(_read(text + "\n")))
    return made


def _reads(texts: Iterable[str], name: str) -> bool:
    """Whether one of these texts reads an attribute of this name."""
    return any(re.search(rf"\.{name}\b", each) for each in texts)


@functools.lru_cache(maxsize=256)
def _items(name: str, facts: tuple[tuple[str, object], ...]) -> tuple[Item, ...]:
    source = resources.files("fusewright.runtime").joinpath(f"{name}.py").read_text()
    return tuple(_read(specialised(_stripped(source), dict(facts))))


def _read(text: str) -> Iterator[Item]:
    for node in ast.parse(text).body:
        lines = text.splitlines()[_first_line(node) - 1 : node.end_lineno]
        match node:
            case ast.ImportFrom(module=module) if str(module).startswith("fusewright"):
                continue
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names = [alias.asname or alias.name.split(".")[0] for alias in aliases]
                yield Item(frozenset(names), frozenset(), "\n".join(lines), is_import=True)
                continue
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case _:
                targets = getattr(node, "targets", [getattr(node, "target", node)])
                names = [each.id for each in targets if isinstance(each, ast.Name)]
        uses = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        yield Item(frozenset(names), frozenset(uses), "\n".join(lines))


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _stripped(source: str) -> str:
    """The program without docstrings, comments and annotations, formatted as before."""
    source = _without_comments(source)
    lines = lines_of(source)
    tree = ast.parse(source)
    edits = [edit for node in ast.walk(tree) for edit in _strip(node, lines)]
    text = edited(lines, outermost(edits))
    text = _BLANKS.sub(lambda found: "\n" * min(found.group().count("\n"), 3), text)
    text = re.sub(r"(:\n)\n+", r"\1", text)  # before a class's first method
    return text.rstrip("\n") + "\n"


def _without_comments(source: str) -> str:
    lines = lines_of(source)
    edits = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            before = lines[row - 1][:column]
            if before.strip():
                edits.append(Edit((row, len(before.rstrip())), token.end, "", ""))
            else:
                edits.append(Edit((row, 0), (row + 1, 0), "", ""))
    return edited([*lines, ""], edits)


def _strip(node: ast.AST, lines: Sequence[str]) -> Iterator[Edit]:
    match node:
        case ast.Module(body=[first, *_]) | ast.ClassDef(body=[first, _, *_]):
            yield from _docstring(first)
            if not getattr(node, "bases", ["a NamedTuple, perhaps"]):
                bare = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                yield from (_line(each) for each in bare if each.value is None)
        case ast.FunctionDef(body=body):
            if len(body) > 1:
                yield from _docstring(body[0])
            yield _signature(node, lines)
        case ast.AnnAssign(target=target, annotation=annotation, value=ast.expr()):
            if isinstance(target, (ast.Name, ast.Attribute)):
                yield Edit(span(target, lines)[1], span(annotation, lines)[1], "", "")
        case ast.AnnAssign(target=ast.Name(), value=None) if node.col_offset == 0:
            yield _line(node)


def _docstring(first: ast.stmt) -> Iterator[Edit]:
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        yield _line(first)


def _line(node: ast.stmt) -> Edit:
    """Without the lines of this statement."""
    return Edit((node.lineno, 0), ((node.end_lineno or node.lineno) + 1, 0), "", "")


def _signature(node: ast.FunctionDef, lines: Sequence[str]) -> Edit:
    """The function's head on one line, without annotations."""
    bare = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)
    every = [*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs]
    for arg in (*every, bare.args.vararg, bare.args.kwarg):
        if arg is not None:
            arg.annotation = None
    start: Spot = spot(lines, node.lineno, node.col_offset)
    first = node.body[0]
    head = "".join(lines[node.lineno - 1 : first.lineno - 1])
    end = (first.lineno - 1, len(lines[first.lineno - 2].rstrip("\n")))
    if first.lineno == node.lineno or not head.rstrip().endswith(":"):
        raise ValueError(f"{node.name}: its body must begin on a line of its own")
    return Edit(start, end, "", f"def {node.name}({ast.unparse(bare.args)}):")
