"""How busy other processes keep the CPU while we measure.

A short call begins on the CPU, so whoever takes its cores shows in every time. Linux counts the
seconds of all processes together; ours are subtracted. Children that have not ended count as
others: what a candidate left running disturbs the rest as much as a stranger does.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Of the first line: user, nice, system, idle, iowait, irq, softirq, steal, and guests, which user
# and nice have in them already.
_IDLE, _COUNTED = (3, 4), 8


@dataclass(frozen=True)
class Moment:
    """Seconds: of the clock, of all processes together, and of this one."""

    clock_s: float
    all_s: float
    own_s: float


def now() -> Moment | None:
    """None where the system does not count."""
    if not _STAT.exists():
        return None
    ticks = [int(each) for each in _STAT.read_text().split("\n", 1)[0].split()[1:]][:_COUNTED]
    busy = sum(each for at, each in enumerate(ticks) if at not in _IDLE)
    return Moment(time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))


def other_cores(before: Moment | None, after: Moment | None) -> float:
    """The cores that others had, on average; 0 where nobody counts."""
    if before is None or after is None or after.clock_s <= before.clock_s:
        return 0.0
    others = (after.all_s - before.all_s) - (after.own_s - before.own_s)
    return max(0.0, others / (after.clock_s - before.clock_s))
