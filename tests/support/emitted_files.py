"""Emitted files, executed, and the words they must not contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.problem.load import load_problem

FORBIDDEN_WORDS = r"\b(try|except)\b|pass"  # a regular expression


def emitted(
    problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, Any], Any]:
    """The emitted text of a problem, the names it defines, and the problem's inputs. Kernels are
    built in a cache of their own; sys.modules does not know the module."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(folder / "cache"))
    path = folder / "problem.py"
    path.write_text(problem)
    loaded = load_problem(path)
    args: Any = loaded.make_inputs()
    text = file_text(solve(loaded.make_model(), args).bundle, loaded.source, "")
    names: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(text, "<emitted>", "exec"), names)
    return text, names, args


def executed(text: str) -> dict[str, Any]:
    """The names that the file defines, executed as strict checkers do: without a `__file__`."""
    names: dict[str, Any] = {}
    exec(compile(text, "<emitted>", "exec"), names)
    return names
