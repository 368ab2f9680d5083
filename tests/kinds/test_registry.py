"""A kind of kernel is one record: nothing else asks for kinds, and a fifth needs no other edit."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fusewright import build as building
from fusewright.codegen.source import Rendered, Workspace
from fusewright.errors import CodegenError
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Argument
from fusewright.kinds import registry
from fusewright.kinds.kind import Kind
from fusewright.schedule.choice import Schedule
from fusewright.target.target import Target
from fusewright.tune import store
from fusewright.tune.candidates import worth_trying
from fusewright.tune.search import settled, tune

PACKAGE = Path(registry.__file__).resolve().parents[1]
HOST, CPU = Target.host(), torch.device("cpu")
N = Dim(1, ("n",))

# Where else a kernel or schedule may be told from others of its kind, and why.
PERMITTED = {
    "codegen/convolution.py": "a convolution has two schedules, and this file writes both",
    "plan/inference.py": "an output is left out of a loop, or of the loop in an epilogue",
    "plan/convolutions.py": "a weight gradient reads what the convolution beside it has staged",
}
FOLDERS = ("kinds", "ir")


def asked_for(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every class that an isinstance or a case asks for."""
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            parts = [node.args[1]]
        elif isinstance(node, ast.MatchClass):
            parts = [node.cls]
        for part in parts:
            for each in ast.walk(part):
                name = each.id if isinstance(each, ast.Name) else getattr(each, "attr", "")
                if name:
                    yield each.lineno, name  # type: ignore[attr-defined]


def test_nothing_else_asks_for_the_kind_of_a_kernel() -> None:
    kernels = {kind.kernel.__name__ for kind in registry.KINDS}
    schedules = {each.__name__ for kind in registry.KINDS for each in kind.schedules.values()}
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in FOLDERS:
            continue
        for line, asked in asked_for(ast.parse(path.read_text())):
            if asked in kernels | schedules:
                found.setdefault(str(name), []).append(f"{name}:{line} asks for {asked}")
    assert found.keys() <= PERMITTED.keys(), found
    assert found.keys() == PERMITTED.keys(), "a place that is permitted is no longer in use"


def test_every_kind_is_told_by_one_name() -> None:
    names = [kind.kernel.kind for kind in registry.KINDS]
    stored = [name for kind in registry.KINDS for name in kind.schedules]
    assert names == ["loop", "matmul", "convolution", "weight_gradient"]
    assert len(set(stored)) == len(stored)
    assert [registry.words_of(name) for name in names] == [kind.words for kind in registry.KINDS]


@dataclass(frozen=True)
class Doubling:
    """y = 2 x, as a kind of its own."""

    name: str
    summary: str = "doubling"
    symbols: tuple[str, ...] = ("n",)
    arguments: tuple[Argument, ...] = (
        Argument("x", "float32", False),
        Argument("y", "float32", True),
    )
    kind: ClassVar[str] = "doubling"
    on_tensor_cores: ClassVar[bool] = False

    def canonical(self) -> Doubling:
        return replace(self, name="", summary="")

    def as_repeated(self) -> Doubling:
        return self

    def overwrites(self, source: str, target: str) -> bool:
        return False

    def is_empty(self, sizes: Mapping[str, int]) -> bool:
        return sizes["n"] == 0

    def bytes_moved(self, sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
        return 8 * sizes["n"]

    def operations(self, sizes: Mapping[str, int]) -> int:
        return sizes["n"]


@dataclass(frozen=True)
class Steps:
    """How many elements the loop takes at once."""

    step: int


def written(kernel: Doubling, schedule: Steps, target: Target) -> Rendered:
    lines = [
        f"FW_ENTRY({kernel.name}, void* x, void* y, int64_t n) {{",
        f"  for (int64_t i = 0; i < n; i += {schedule.step})",
        f"    for (int64_t j = i; j < n && j < i + {schedule.step}; ++j)",
        "      static_cast<float*>(y)[j] = 2 * static_cast<const float*>(x)[j];",
        "  return 0;",
        "}",
    ]
    return Rendered(lines, 1, names=(kernel.name,))


DOUBLING = Kind(
    kernel=Doubling,
    words="doubling of ours",
    schedules={"doubling": Steps},
    choose=lambda kernel, target, sizes: Steps(1),
    permits=lambda kernel, choice, target: choice.step >= 1,
    variations=lambda kernel, first, target, sizes: [Steps(step) for step in (0, 4, 16)],
    workspace=lambda kernel, choice, target: Workspace(fixed=choice.step),
    render=written,
    elements=lambda kernel, sizes: {"x": sizes["n"], "y": sizes["n"]},
    summands=lambda kernel, sizes: 0,
)


@pytest.fixture
def fifth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doubling:
    monkeypatch.setattr(registry, "KINDS", (*registry.KINDS, DOUBLING))
    monkeypatch.setenv("FUSEWRIGHT_TUNED", "1")
    monkeypatch.setattr(store, "trusted_folder", lambda _: building.trusted_folder(tmp_path))
    return Doubling("custom_doubling")


def test_a_fifth_kind_is_scheduled(fifth: Doubling) -> None:
    tried = worth_trying(fifth, HOST, {"n": 1000})
    assert tried == (Steps(1), Steps(4), Steps(16))
    assert not registry.permitted(fifth, Steps(0), HOST)
    assert not registry.permitted(fifth, Schedule("pointwise"), HOST)


def test_a_fifth_kind_is_rendered(fifth: Doubling) -> None:
    source = registry.render([(fifth, Steps(4))], HOST)
    (entry,) = source.entries
    assert entry.arguments == ("x", "y") and entry.workspace == Workspace(fixed=4)
    assert source.text.rstrip().endswith("\n".join(written(fifth, Steps(4), HOST).lines))
    with pytest.raises(CodegenError, match="no schedule of a doubling"):
        registry.render([(fifth, Schedule("pointwise"))], HOST)
    assert registry.words_of("doubling") == "doubling of ours"


def test_a_fifth_kind_is_tuned_and_found_again(fifth: Doubling) -> None:
    """Built, run beside one another, compared, timed, and kept."""
    sized: list[Any] = [(fifth, {"n": 1000})]
    found = tune(sized, HOST, CPU, lambda words, share: None)
    assert found["custom_doubling"].heuristic == Steps(1)
    assert found["custom_doubling"].schedule in (Steps(1), Steps(4), Steps(16))
    kept = settled(sized, HOST, CPU)["custom_doubling"]
    assert kept.schedule == found["custom_doubling"].schedule
