"""Every stage takes work in proportion to the number of blocks.

Function calls are counted, not seconds: their number does not depend on what else the machine does.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "planning_time.py"
BLOCKS = (2, 3, 5)  # one block more, then two
LIMIT = 1.15
SMALL = 0.02  # a stage that grows by less than this share of all calls is constant


def test_work_grows_linearly() -> None:
    command = [sys.executable, str(TOOL), "--kinds", "chain", "--modes", "train", "--calls"]
    ran = subprocess.run(
        [*command, "--blocks", *map(str, BLOCKS)], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in ran.stdout.splitlines()]
    calls = {row[0]: [float(each) for each in row[1 : 1 + len(BLOCKS)]] for row in rows[1:]}
    assert set(calls) == {"capture", "rewrite", "plan", "schedule", "render"}
    total = sum(each[-1] for each in calls.values())
    for stage, (first, second, third) in calls.items():
        # Differences leave out what does not depend on the number of blocks.
        early, late = second - first, third - second
        if late > SMALL * total:
            assert early > 0, (stage, calls[stage])
            assert math.log2(late / early) <= LIMIT, (stage, calls[stage])
