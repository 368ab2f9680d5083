"""The emitted file of a problem's text, executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.problem.load import load_problem


def emitted(
    problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, Any], Any]:
    """Its text, its names, and the problem's inputs; kernels are built in a cache of their own. The
    module is one that sys.modules does not know."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(folder / "cache"))
    path = folder / "problem.py"
    path.write_text(problem)
    loaded = load_problem(path)
    args: Any = loaded.make_inputs()
    text = file_text(solve(loaded.make_model(), args).bundle, loaded.source, "")
    names: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(text, "<emitted>", "exec"), names)
    return text, names, args
