"""Writes docs/sample_model_new.py.txt, a sample of an emitted file: `python -m docs.make_sample`.

The sample is what `fusewright optimize examples/blocks/gated_rms_norm.py --device cpu` writes, with
two long parts left out: the run time, which is the text of fusewright/runtime, and the C++ headers,
which are the text of fusewright/kernels. What depends on the machine (device, versions, measured
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
from fusewright.problem.load import Problem, load_problem
from fusewright.report import Outcome, header

DOCS = Path(__file__).resolve().parent
PROBLEM = DOCS.parent / "examples" / "blocks" / "gated_rms_norm.py"
SAMPLE = DOCS / "sample_model_new.py.txt"
RUN_TIME = re.compile(r"(# ---- the run time [^\n]*\n).*?(?=\n\n# ---- )", re.DOTALL)
HEADERS = re.compile(r'(_FW_SOURCE = r""").*?(?=\nnamespace \{\n// custom_)', re.DOTALL)
MADE_ON = re.compile(r"^Made on .*$", re.MULTILINE)
CONTENT = re.compile(r"(gated_rms_norm)_[0-9a-f]{16}_")
MADE_HERE = """Made on DEVICE; VERSIONS.

[Here the file states measured times and errors. docs/make_sample.py left them out, and further
down two long parts that are copied from the package. Each place is marked.]"""


def solved(problem: Problem) -> Solution:
    """The problem's kernels for a CPU, with the heuristic's schedules."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, FUSEWRIGHT_TUNED="0"):
        return solve(problem.make_model(), problem.make_inputs(), name=problem.name)


def sample_text() -> str:
    """The sample as the code of today writes it."""
    problem = load_problem(PROBLEM)
    solution = solved(problem)
    outcome = Outcome(problem.name, "", "both", solution.prepared.modes, 0.0, "")
    text = file_text(solution.bundle, problem.source, header(outcome))
    text = _replaced(MADE_ON, MADE_HERE, text)
    text = _replaced(RUN_TIME, r"\1\n# [left out: the text of fusewright/runtime/*.py]", text)
    headers = r"\1\n// [left out: the text of headers in fusewright/kernels]"
    return CONTENT.sub(r"\1_HASH_", _replaced(HEADERS, headers, text))


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
