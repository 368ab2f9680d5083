"""Writes docs/sample_model_new.py.txt, a sample of an emitted file: `python -m docs.make_sample`.

The sample is what `fusewright optimize examples/blocks/gated_rms_norm.py --device cpu` writes,
without the support code at its end. What depends on the machine (device, versions, measured
figures) is left out, too, so that the same code gives the same text everywhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import torch

from fusewright.compile.solution import Solution, solve
from fusewright.emit.file import file_text
from fusewright.outcome import Outcome, header
from fusewright.problem.load import Problem, load_problem

DOCS = Path(__file__).resolve().parent
PROBLEM = DOCS.parent / "examples" / "blocks" / "gated_rms_norm.py"
SAMPLE = DOCS / "sample_model_new.py.txt"
SUPPORT = re.compile(r"(# ---- support code[^\n]*\n).*", re.DOTALL)
MADE_ON = re.compile(r"^Made on .*$", re.MULTILINE)
MADE_HERE = """Made on DEVICE; VERSIONS.

[Here the file states measured times and errors. docs/make_sample.py left them out, and the support
code at the end.]"""
LEFT_OUT = r"\1# [left out: the run time, the C++ drivers, and the tables that connect both]\n"


def solved(problem: Problem) -> Solution:
    """The problem's kernels for a CPU, with the heuristic's schedules."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, FUSEWRIGHT_TUNED="0"):
        return solve(problem.make_model(), problem.make_inputs(), name=problem.name, build=False)


def sample_text() -> str:
    """The sample as the code of today writes it."""
    problem = load_problem(PROBLEM)
    solution = solved(problem)
    outcome = Outcome(problem.name, "", "both", solution.prepared.modes, "")
    text = file_text(solution.bundle, problem.source, header(outcome))
    text = _replaced(MADE_ON, MADE_HERE, text)
    return _replaced(SUPPORT, LEFT_OUT, text)


def _replaced(pattern: re.Pattern[str], words: str, text: str) -> str:
    text, count = pattern.subn(words, text, count=1)
    if not count:
        raise ValueError(f"the emitted file has no {pattern.pattern!r}: adapt docs/make_sample.py")
    return text


def main() -> None:
    SAMPLE.write_text(sample_text(), encoding="utf-8")
    print(f"{SAMPLE.name} written")


if __name__ == "__main__":
    main()
