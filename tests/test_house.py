"""The rules of the house that a machine can hold: who imports whom, and how long things grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fusewright"

# A module imports only from rows above its own; those of one row may import one another.
ORDER = (
    ("errors", "debug"),
    ("problem",),
    ("runtime",),
    ("ir",),
    ("target",),
    ("cost",),
    ("schedule",),
    ("capture",),
    ("rewrite",),
    ("plan",),
    ("codegen", "kernels"),
    ("build",),
    ("tune",),
    ("emit",),
    ("compile",),
    ("verify",),
    ("report",),
    ("bench",),
    ("page",),
    ("cli", "__init__", "__main__"),
)
ROW = {name: row for row, names in enumerate(ORDER) for name in names}
# Where torch may be imported at the top: stages, and single files of those that are free of it.
WITH_TORCH = set("runtime capture tune compile verify bench".split())
FILES_WITH_TORCH = {"problem/inputs.py", "ir/interpret.py", "target/device.py"}
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("fusewright", "examples", "tests", "docs", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
) + [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60


def component(path: Path) -> str:
    """The stage that a file belongs to: plan for plan/steps.py, build for build.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def ours(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and stage of every import from this package, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fusewright."):
                    yield node.lineno, alias.name.split(".")[1]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full"
            parts = (node.module or "").split(".")
            if parts[0] == "fusewright":
                names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
                yield from ((node.lineno, name) for name in names)


def imports_torch(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    stage = component(path)
    assert stage in ROW, f"{stage} has no place in ORDER yet"
    for line, name in ours(ast.parse(path.read_text())):
        if name == "__version__":
            continue  # The package's own name for itself, no stage.
        assert name in ROW, f"{name_of(path)}:{line} imports {name}, which has no place in ORDER"
        assert ROW[name] <= ROW[stage], f"{name_of(path)}:{line}: {stage} must not import {name}"


def test_runtime_stands_alone() -> None:
    """`emit` pastes it into the user's file, where nothing else of ours is."""
    for path in SOURCES:
        if component(path) == "runtime":
            assert {name for _, name in ours(ast.parse(path.read_text()))} <= {"runtime"}, path


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_torch_is_imported_where_it_is_needed_only(path: Path) -> None:
    if component(path) in WITH_TORCH or str(path.relative_to(PACKAGE)) in FILES_WITH_TORCH:
        return
    lines = [node.lineno for node in ast.parse(path.read_text()).body if imports_torch(node)]
    assert lines == [], f"{name_of(path)} imports torch"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_no_file_knows_this_machine() -> None:
    places = {str(ROOT), str(Path.home())} - {"/"}
    for path in TEXTS:
        text = path.read_bytes()
        for place in places:
            assert f"{place}/".encode() not in text, f"{name_of(path)} names {place}"


def test_the_rules_catch_what_they_forbid() -> None:
    tree = ast.parse("import torch\nfrom fusewright.plan.steps import Plan\nimport fusewright.ir\n")
    assert list(ours(tree)) == [(2, "plan"), (3, "ir")]
    assert [imports_torch(node) for node in tree.body] == [True, False, False]
    assert ROW["ir"] < ROW["plan"]


def test_the_order_names_what_exists() -> None:
    assert {component(path) for path in SOURCES} | {"kernels"} == set(ROW)
