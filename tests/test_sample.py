"""What docs/ shows of generated text and figures is what the code and the records give today."""

from __future__ import annotations

import difflib
import re

import pytest
import torch

from docs import draw_speedups, make_sample, refresh_dumps

# Names in graphs are PyTorch's, and differ between its versions.
MADE_WITH = "2.13"


@pytest.mark.skipif(
    not torch.__version__.startswith(MADE_WITH), reason=f"made with PyTorch {MADE_WITH}"
)
def test_the_sample_of_an_emitted_file_is_up_to_date() -> None:
    kept, made = make_sample.SAMPLE.read_text(), make_sample.sample_text()
    different = difflib.unified_diff(kept.splitlines(), made.splitlines(), lineterm="")
    words = "\n".join(list(different)[:40])
    assert kept == made, f"run `python -m docs.make_sample`:\n{words}"


def test_the_chart_shows_the_records() -> None:
    made = draw_speedups.picture(draw_speedups.groups())
    assert draw_speedups.PICTURE.read_text() == made, "run `python -m docs.draw_speedups`"


def test_the_table_of_the_readme_shows_the_records() -> None:
    text = (make_sample.DOCS.parent / "README.md").read_text()
    for group in draw_speedups.groups():
        (row,) = re.findall(rf"^\| \[{group.problem}\].*$", text, re.MULTILINE)
        shown = [float(each) for each in re.findall(r"\*\*(\S+)×\*\*", row)]
        best = [each.ours / max(each.compiled, 1.0) for each in group.passes]
        assert shown == pytest.approx(best, abs=0.006)


@pytest.mark.skipif(
    not torch.__version__.startswith(MADE_WITH), reason=f"made with PyTorch {MADE_WITH}"
)
def test_the_dumps_of_the_architecture_page_are_up_to_date() -> None:
    kept = refresh_dumps.PAGE.read_text()
    assert kept == refresh_dumps.refreshed(kept), "run `python -m docs.refresh_dumps`"
