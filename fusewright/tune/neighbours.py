"""How busy other processes keep the CPU while we measure.

A short call begins on the CPU, so every process that takes its cores shows in the times. Linux
counts the seconds of all processes together; ours are subtracted. Children that still run count as
others: they disturb the measurement just as much.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY_CORES = 0.5  # that others use: from here on times are not to be trusted
# The first line: user, nice, system, idle, iowait, irq, softirq, steal, then guests, which user and
# nice already include.
_IDLE, _COUNTED = (3, 4), 8


@dataclass(frozen=True)
class Moment:
    """Seconds of the clock, and CPU seconds of all processes together and of this one."""

    clock_s: float
    all_s: float
    own_s: float


def now() -> Moment | None:
    """The present moment; None if the system does not count."""
    if not _STAT.exists():
        return None
    ticks = [int(each) for each in _STAT.read_text().split("\n", 1)[0].split()[1:]][:_COUNTED]
    busy = sum(each for at, each in enumerate(ticks) if at not in _IDLE)
    return Moment(time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))


def other_cores(before: Moment | None, after: Moment | None) -> float:
    """The average number of cores that other processes used; 0 if it is unknown."""
    if before is None or after is None or after.clock_s <= before.clock_s:
        return 0.0
    others = (after.all_s - before.all_s) - (after.own_s - before.own_s)
    return max(0.0, others / (after.clock_s - before.clock_s))


def warning(cores: float) -> str:
    """What to say if other processes used half a core or more while we measured, or nothing.

    On a CPU it can be far more than a little: eager's threads wait for each other, and a model's
    median of 0.1 ms became 100 ms beside six other jobs on two cores.
    """
    if cores < _BUSY_CORES:
        return ""
    busy = f"other processes kept {cores:.1f} of {os.cpu_count()} CPU cores busy"
    return f"{busy} during the measurement, so its times and ratios may be far off"
