"""Files that cheat, are wrong or do harm are caught; honest ones in many styles are accepted.

Every file in candidates/ names the verdicts that fit it in a line `# verdict: …`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusewright.judge import process, processes
from fusewright.judge.judge import judge
from fusewright.judge.process import Limits
from fusewright.judge.processes import missing_confinement, with_token
from fusewright.judge.verdict import Verdict

FOLDER = Path(__file__).parent / "candidates"
SECONDS = 240.0  # compilers take their time on a busy machine
HANG_SECONDS = 4.0
MEMORY_BYTES = 6 << 30
FILES = {path: re.search(r"^# verdict: (.+)$", path.read_text(), re.M) for path in FOLDER.iterdir()}
WORDS = {
    path: [word.replace("-", " ") for word in found[1].split()]
    for path, found in sorted(FILES.items(), key=lambda each: each[0].stem)
    if found
}
EXPLOITS = [path for path, words in WORDS.items() if "accepted" not in words]
HONEST = [path for path, words in WORDS.items() if "accepted" in words]
# Files that surely run a kernel of their own; some others fall back, which is no fault.
WITH_KERNELS = ("compiled_c", "load_inline", "compiled_by_torch", "numpy_result")
needs_box = pytest.mark.skipif(bool(missing_confinement()), reason=missing_confinement() or "-")


def judged(path: Path, *, confined: bool = True) -> Verdict:
    found = re.search(r"^from (norm|dropping) import", path.read_text(), re.M)
    problem = f"{found[1]}.py" if found else "small.py"
    seconds = HANG_SECONDS if WORDS[path] == ["timed out"] else SECONDS
    return judge(FOLDER / problem, path, limits=Limits(seconds, MEMORY_BYTES), confined=confined)


@needs_box
@pytest.mark.sample(9)
@pytest.mark.parametrize("path", EXPLOITS, ids=lambda path: path.stem)
def test_exploits_are_caught(path: Path) -> None:
    verdict = judged(path)
    assert verdict.word in WORDS[path], verdict.lines()
    assert verdict.reason and verdict.exit_code


@needs_box
@pytest.mark.sample(5)
@pytest.mark.parametrize("path", HONEST, ids=lambda path: path.stem)
def test_honest_files_are_accepted(path: Path) -> None:
    verdict = judged(path)
    assert verdict.word == "accepted", verdict.lines()
    assert verdict.calls > 40 and verdict.checks > 150
    wanted = re.search(r"^# flag: (.+)$", path.read_text(), re.M)
    fallback = [each for each in verdict.flags if each.startswith("runs all of the model's own")]
    if wanted or path.stem in WITH_KERNELS:
        assert bool(fallback) == bool(wanted), verdict.flags


@pytest.mark.sample(2)
@pytest.mark.parametrize("confined", [pytest.param(True, marks=needs_box), False])
def test_nothing_is_left_running(confined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file accepts a verdict and leaves a process in a session of its own."""
    tokens: list[str] = []
    found: list[int] = []

    def watched(token: str) -> None:
        tokens.append(token)
        found.append(len(with_token(token)))
        processes.end_all(token)

    monkeypatch.setattr(process, "end_all", watched)
    verdict = judged(FOLDER / "leaves_processes.py", confined=confined)
    assert verdict.word == "accepted", verdict.lines()
    assert found == [0], "the box ends before all of its processes have ended"
    assert with_token(tokens[0]) == []
