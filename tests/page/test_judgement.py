"""A page of verdicts: what it says, and that a file's own words cannot become markup."""

from __future__ import annotations

from pathlib import Path

from fusewright.judge.times import Conditions, PassTimes, speedups_of, times_of
from fusewright.judge.verdict import Verdict
from fusewright.page.judgement import render_verdicts


def test_one_file_with_times() -> None:
    times = (times_of("candidate", [10.0] * 8), times_of("eager", [25.0] * 8))
    found = PassTimes("train", "train", 8, 4, 90.0, 1.5, times, speedups_of(times))
    conditions = Conditions("a CPU", "the judge's", 2, 64 << 20, 5e10, 1e11)
    verdict = Verdict("accepted", "right in 9 calls", times=(found,), conditions=conditions)
    page = render_verdicts(Path("small.py"), {Path("mine.py"): verdict})
    assert "1 of 1 accepted" in page and "accepted: right in 9 calls" in page
    assert "2.50× (2.50 to 2.50)" in page and "forward and backward, train mode: 8 rounds" in page
    assert "64 MiB overwritten" in page and "copies 50.0 GB/s at best" in page


def test_several_files_and_hostile_words() -> None:
    bad = Verdict(
        "dishonest", "<script>alert(1)</script>", "call 3", "a", "b", output="<img src=x>"
    )
    good = Verdict("accepted", "right", flags=("refuses calls with one row",))
    page = render_verdicts(Path("p.py"), {Path("a<b>.py"): bad, Path("c.py"): good})
    assert "1 of 2 accepted" in page and "All files" in page
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
    assert "<img" not in page and "a&lt;b&gt;.py" in page
    assert "refuses calls with one row" in page and "call 3" in page
