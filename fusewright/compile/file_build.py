"""The kernels of an emitted file, built by the file itself before anything is called.

So they are compiled once, by the code that the file's users will run, and whoever runs the final
file finds them in the cache. What the file raises becomes one of our named errors.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusewright.build import find_compiler, first_lines, trusted_folder, writing_cache
from fusewright.compile.solution import SHARE_PREPARED, Solution
from fusewright.emit.file import file_text
from fusewright.errors import CompileFailed
from fusewright.problem.load import Problem, load_candidate
from fusewright.tune.search import OnProgress


def with_kernels_of_file(
    solution: Solution, problem: Problem, progress: OnProgress, *, keep_words: bool = False
) -> Solution:
    """The solution, with the kernels of its emitted file in the cache, which took its `seconds`."""
    text = file_text(solution.bundle, problem.source, problem.name, keep_words=keep_words)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model_new.py")
        path.write_text(text, encoding="utf-8")
        names = load_candidate(path, problem).names
        built = build_kernels(names, solution.bundle.language, progress)
    return dataclasses.replace(solution, seconds=built.seconds, cached=built.cached)


@dataclass(frozen=True)
class FileBuild:
    """How long the kernels took, and whether no compiler ran."""

    seconds: float
    cached: bool


def build_kernels(names: Mapping[str, Any], language: str, progress: OnProgress) -> FileBuild:
    """Build the kernels of an executed emitted file, of which these are the names.

    Those of other precisions are built later, if they are needed, with the same errors.
    """
    trusted_folder(None)
    compiled: list[str] = []

    def build(text: str, name: str, folder: Path) -> None:
        compiled.append(name)
        find_compiler(language)
        with writing_cache(folder.parent):
            try:
                names["_fw_build"](text, name, folder)
            except RuntimeError as error:
                words = first_lines(str(error))
                raise CompileFailed(f"the {language} compiler failed\n{words}") from error

    kernels = names["_fw_kernels"]
    kernels._load = names["_fw_loader"](names["_fw_recipe"], build)
    progress("compile kernels", SHARE_PREPARED)
    start = time.perf_counter()
    kernels.build()
    return FileBuild(time.perf_counter() - start, not compiled)
