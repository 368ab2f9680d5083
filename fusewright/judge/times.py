"""The times of a judgement, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.tune.stats import Interval, median_interval, speedup

CANDIDATE = "candidate"


@dataclass(frozen=True)
class Times:
    """The microseconds of one call of one subject: the median, and its 95 % interval."""

    subject: str
    median_us: float
    low_us: float
    high_us: float
    samples_us: tuple[float, ...]


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as a baseline the candidate is, with its 95 % interval."""

    baseline: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PassTimes:
    """One pass: `forward` without gradients, or `train`, which is forward and backward.

    A request has `sets` calls with other inputs each. `empty_us` is what a request takes in which
    nothing is computed; it is subtracted. No call can take less than `floor_us`. `other_cores` is
    how many cores other programs used meanwhile. On a GPU the judge waited `hidden_us` longer than
    the device's clock tells, beyond what it waits in an empty request.
    """

    name: str
    mode: str
    rounds: int
    sets: int
    empty_us: float
    floor_us: float
    times: tuple[Times, ...]
    speedups: tuple[Speedup, ...]
    notes: tuple[str, ...] = ()
    other_cores: float = 0.0
    hidden_us: float = 0.0

    def of(self, subject: str) -> Times | None:
        return next((each for each in self.times if each.subject == subject), None)

    def line(self) -> str:
        """The pass in words."""
        parts = [f"{each.subject} {_shown(each.median_us)}" for each in self.times]
        gains = [
            f"{each.value:.2f}× {each.baseline} ({each.low:.2f} to {each.high:.2f})"
            for each in self.speedups
        ]
        label = "forward" if self.name == "forward" else "forward and backward"
        return f"{label}: {', '.join(parts)}; {', '.join(gains) or 'no baseline'}"


@dataclass(frozen=True)
class Conditions:
    """What the times hold for."""

    device: str
    clock: str
    threads: int
    flushed_bytes: int
    copy_bytes_per_s: float
    operations_per_s: float


def _shown(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.1f} µs"
    return f"{microseconds / 1e3:.3f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3f} s"


def gain_in_words(passes: Sequence[PassTimes]) -> str:
    """What the times mean, against the best baseline of each pass; empty without times."""
    parts = []
    for each in passes:
        if each.speedups:
            least = min(each.speedups, key=lambda one: one.value)
            label = "forward" if each.name == "forward" else "with backward"
            parts.append(f"{label} {least.value:.2f}× as fast as {least.baseline}")
    return f"; {', '.join(parts)}" if parts else ""


def times_of(subject: str, samples_us: Sequence[float]) -> Times:
    found = median_interval(samples_us)
    return Times(subject, found.value, found.low, found.high, tuple(samples_us))


def speedups_of(times: Sequence[Times]) -> tuple[Speedup, ...]:
    """The candidate against each other subject, from samples of the same rounds."""
    mine = next(each for each in times if each.subject == CANDIDATE)
    if min(mine.samples_us) <= 0.0:
        return ()
    found: list[tuple[str, Interval]] = [
        (each.subject, speedup(each.samples_us, mine.samples_us))
        for each in times
        if each is not mine
    ]
    return tuple(Speedup(name, each.value, each.low, each.high) for name, each in found)
