"""Puts today's dumps into docs/architecture.md: `python -m docs.refresh_dumps`.

A block there follows a comment, <!-- dump STAGE from "FIRST" to "LAST" -->. It holds the lines of
that stage's dump from the first that begins with FIRST up to the next that begins with LAST,
which is left out. The dumps are those of examples/blocks/linear_relu_softmax.py in train mode,
for a CPU.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import torch

from fusewright.compile.pipeline import prepare
from fusewright.problem.load import load_problem

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "architecture.md"
PROBLEM = DOCS.parent / "examples" / "blocks" / "linear_relu_softmax.py"
BLOCK = re.compile(
    r'(<!-- dump (?P<stage>\S+) from "(?P<first>[^\n]*)" to "(?P<last>[^\n]*)" -->\n```\w*\n)'
    r"(.*?)(?=```\n)",
    re.DOTALL,
)


def dumps(folder: Path) -> dict[str, list[str]]:
    """The lines of every stage's dump, by the stage's name."""
    problem = load_problem(PROBLEM)
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, FUSEWRIGHT_DUMP=str(folder), FUSEWRIGHT_TUNED="0"):
        prepare(
            problem.make_model(),
            tuple(problem.make_inputs()),
            modes=("train",),
            device=torch.device("cpu"),
        )
    # The names begin with the number of the dump in its process.
    return {path.stem.partition("_")[2]: path.read_text().splitlines() for path in folder.iterdir()}


def cut(lines: list[str], first: str, last: str) -> list[str]:
    """From the line that begins with `first` up to the next that begins with `last`."""
    start = next(at for at, line in enumerate(lines) if line.startswith(first))
    rest = lines[start + 1 :]
    end = next((at for at, line in enumerate(rest) if line.startswith(last)), len(rest))
    found = [lines[start], *rest[:end]]
    while not found[-1]:
        del found[-1]
    return found


def refreshed(text: str) -> str:
    """The page with today's dumps in it."""
    with tempfile.TemporaryDirectory() as folder:
        stages = dumps(Path(folder))

    def block(match: re.Match[str]) -> str:
        lines = cut(stages[match["stage"]], match["first"], match["last"])
        return match[1] + "\n".join(lines) + "\n"

    return BLOCK.sub(block, text)


def main() -> None:
    PAGE.write_text(refreshed(PAGE.read_text()), encoding="utf-8")
    print(f"{PAGE.name} written")


if __name__ == "__main__":
    main()
