"""Rules of the repository: which modules import which, and how long files and functions are."""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
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
    ("kinds",),
    ("build",),
    ("tune",),
    ("emit",),
    ("compile",),
    ("verify",),
    ("judge",),
    ("outcome",),
    ("report", "progress"),
    ("bench",),
    ("page",),
    ("judge_command", "options"),
    ("cli", "__init__", "__main__"),
)
ROW = {name: row for row, names in enumerate(ORDER) for name in names}
# Where torch may be imported at the top of a file: these stages, and single files of others.
WITH_TORCH = set("runtime capture tune compile verify judge bench".split())
FILES_WITH_TORCH = {"problem/inputs.py", "ir/interpret.py", "target/device.py"}
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("fusewright", "examples", "tests", "docs", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
) + [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
KERNELS = sorted(
    path
    for folder in (PACKAGE / "kernels", ROOT / "tests" / "support")
    for path in folder.rglob("*")
    if path.suffix in (".cuh", ".hpp")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
UNRUN = [*sorted((ROOT / "tests" / "gpu").glob("*.py")), ROOT / "tests" / "sanitize.py"]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
USUAL_FUNCTION_LINES = 24  # at most, of 95 in 100 functions


def component(path: Path) -> str:
    """The stage that a file belongs to: plan for plan/steps.py, build for build.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def ours(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and stage of every import from this package, anywhere in the file."""
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


def imported(tree: ast.Module) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of everything that is imported, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            yield from ((node.lineno, (*module, alias.name)) for alias in node.names)


def imported_files(path: Path) -> set[Path]:
    """Files of this package that a file imports, anywhere in it."""
    found = set()
    for _, name in imported(ast.parse(path.read_text())):
        if name[0] == PACKAGE.name:
            # The last word is a module or what it defines.
            places = (ROOT.joinpath(*name), ROOT.joinpath(*name[:-1]))
            files = (
                each
                for place in places
                for each in (place.with_suffix(".py"), place / "__init__.py")
            )
            found |= {next(each for each in files if each.exists())}
    return found - {path, PACKAGE / "__init__.py"}


def is_test_module(name: tuple[str, ...]) -> bool:
    return name[0] == "tests" and any(part.startswith("test_") for part in name)


def function_lines(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every function's name and length."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def imports_torch(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"


def freed_addresses(tree: ast.Module) -> list[int]:
    """Lines that take the address of a new tensor that has no name: its memory is freed at once."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    of_calls = [f for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Call)]
    return [
        func.lineno
        for func in of_calls
        if func.attr == "data_ptr" and not ast.unparse(func.value).endswith(".untyped_storage()")
    ]


def replaced_names(tree: ast.Module) -> list[tuple[int, str, str]]:
    """Line, module and name wherever a test names a part of a module to replace it, as in
    `setattr(module, "name", …)` or `(module, "name")`."""
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusewright.")
        for alias in node.names
    }
    pairs = [node.args for node in ast.walk(tree) if isinstance(node, ast.Call)]
    pairs += [node.elts for node in ast.walk(tree) if isinstance(node, ast.Tuple)]
    return [
        (first.lineno, modules[first.id], second.value)
        for first, second in (pair[:2] for pair in pairs if len(pair) > 1)
        if isinstance(first, ast.Name) and first.id in modules and isinstance(second, ast.Constant)
        if isinstance(second.value, str) and importlib.util.find_spec(modules[first.id])
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    stage = component(path)
    assert stage in ROW, f"{stage} has no place in ORDER yet"
    for line, name in ours(ast.parse(path.read_text())):
        if name == "__version__":
            continue  # The version is no stage.
        assert name in ROW, f"{name_of(path)}:{line} imports {name}, which has no place in ORDER"
        assert ROW[name] <= ROW[stage], f"{name_of(path)}:{line}: {stage} must not import {name}"


def test_no_files_import_each_other() -> None:
    """Not in a circle either, and not inside functions: each file can be read after its imports."""
    files = {name_of(path): map(name_of, imported_files(path)) for path in SOURCES}
    graphlib.TopologicalSorter(files).prepare()


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
    for name, length in function_lines(ast.parse(text)):
        assert length <= MOST_FUNCTION_LINES, f"{name} has {length} lines"


def test_most_functions_are_very_short() -> None:
    lengths = [n for path in SOURCES for _, n in function_lines(ast.parse(path.read_text()))]
    longer = sum(n > USUAL_FUNCTION_LINES for n in lengths)
    assert longer <= 0.05 * len(lengths), f"{longer} of {len(lengths)} functions are longer"


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_no_test_module_is_imported(path: Path) -> None:
    """What several of them need is in tests/support or in a conftest.py."""
    lines = [line for line, name in imported(ast.parse(path.read_text())) if is_test_module(name)]
    assert lines == [], f"{name_of(path)} imports a test module"


@pytest.mark.parametrize("path", BENCHMARKS, ids=name_of)
def test_benchmarks_import_no_tests(path: Path) -> None:
    names = [name for _, name in imported(ast.parse(path.read_text()))]
    assert "tests" not in {name[0] for name in names}


def test_memory_is_held_while_it_is_used() -> None:
    for path in [*SOURCES, *TESTS, *BENCHMARKS]:
        assert freed_addresses(ast.parse(path.read_text())) == [], name_of(path)


@pytest.mark.parametrize("path", UNRUN, ids=name_of)
def test_what_gpu_tests_replace_exists(path: Path) -> None:
    """Nobody else notices here if a function has moved to another module."""
    for line, module, name in replaced_names(ast.parse(path.read_text())):
        assert hasattr(importlib.import_module(module), name), f"line {line}: {module}.{name}"


def clang_format() -> str:
    """The clang-format that pyproject.toml pins; another version may break lines differently."""
    pinned = re.search(r'"clang-format==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    if importlib.util.find_spec("clang_format") is None:
        pytest.skip(f"clang-format is not installed: pip install clang-format=={pinned[1]}")
    found = importlib.metadata.version("clang-format")
    if found != pinned[1]:
        pytest.skip(f"clang-format {found} is installed, and {pinned[1]} is pinned")
    import clang_format

    return str(clang_format.get_executable("clang-format"))


def test_kernels_are_formatted() -> None:
    command = [clang_format(), "--dry-run", "--Werror", *map(str, KERNELS)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_no_file_knows_this_machine() -> None:
    places = {str(ROOT), str(Path.home())} - {"/"}
    for path in TEXTS:
        text = path.read_bytes()
        for place in places:
            assert f"{place}/".encode() not in text, f"{name_of(path)} names {place}"


def test_imports_of_test_modules_are_found() -> None:
    text = "import tests.plan.test_plan\nfrom tests.plan import test_plan, support\n"
    found = list(imported(ast.parse(text + "from tests.test_cli import run\nimport test_time\n")))
    assert [line for line, name in found if is_test_module(name)] == [1, 2, 3]
    assert list(function_lines(ast.parse("def f():\n    return 1\n"))) == [("f", 2)]


def test_the_rules_catch_what_they_forbid() -> None:
    tree = ast.parse("import torch\nfrom fusewright.plan.steps import Plan\nimport fusewright.ir\n")
    assert list(ours(tree)) == [(2, "plan"), (3, "ir")]
    assert [imports_torch(node) for node in tree.body] == [True, False, False]
    assert ROW["ir"] < ROW["plan"]
    freed = "torch.empty(8).data_ptr()\nx.data_ptr()\nx.untyped_storage().data_ptr()\n"
    assert freed_addresses(ast.parse(freed)) == [1]
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": ["b"], "b": ["a"]}).prepare()
    assert PACKAGE / "ir" / "graph.py" in imported_files(PACKAGE / "plan" / "steps.py")
    patches = "from fusewright.ir import graph\nset(graph, 'x', 1)\nset(y, 'x')\n(graph, 'z')\n"
    where = "fusewright.ir.graph"
    assert replaced_names(ast.parse(patches)) == [(2, where, "x"), (4, where, "z")]


def test_the_order_names_what_exists() -> None:
    assert {component(path) for path in SOURCES} | {"kernels"} == set(ROW)
