"""What the text of a file names that no kernel needs: a reason to read it, and no proof.

The text is parsed here and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Dotted names, or their beginnings, and what they are good for.
_NAMES = {
    "sys._getframe": "looks into its callers",
    "inspect.stack": "looks into its callers",
    "inspect.currentframe": "looks into its callers",
    "gc.get_objects": "searches all objects of the process",
    "gc.get_referrers": "searches all objects of the process",
    "sys.settrace": "watches its callers",
    "sys.setprofile": "watches its callers",
    "sys.addaudithook": "watches its callers",
    "sys.meta_path": "changes what others import",
    "sys.path_hooks": "changes what others import",
    "gc.callbacks": "acts when the collector runs",
    "os._exit": "ends its process",
    "os.fork": "starts processes",
    "os.kill": "ends processes",
    "multiprocessing": "starts processes",
    "socket": "opens connections",
    "atexit": "acts when its process ends",
    "torch.library.Library": "may replace PyTorch's operators",
}
_OTHERS = frozenset({"torch", "nn", "functional", "time", "builtins", "os", "sys", "gc"})
_MOST = 5


def tripwires(path: Path) -> tuple[str, ...]:
    """The first few suspicious names, each with its line; none if the text cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return ()
    found: dict[str, str] = {}
    for line, name, why in _suspicious(tree, _aliases(tree)):
        found.setdefault(name, f"the text names {name}, line {line}: it {why}")
    return tuple(found.values())[:_MOST]


def _aliases(tree: ast.Module) -> dict[str, str]:
    """The whole names of what the file imports, by the names that it uses."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def _suspicious(tree: ast.Module, aliases: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node, aliases)
            for each, why in _NAMES.items():
                if name == each or name.startswith(f"{each}."):
                    yield node.lineno, each, why
            if (
                isinstance(node.ctx, ast.Store)
                and name.partition(".")[0] in _OTHERS
                and "." in name
            ):
                yield node.lineno, name, "replaces what others use, too"


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """torch.nn.functional.relu, whatever the file calls it; empty if it is no plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join((aliases.get(node.id, node.id), *reversed(parts)))
