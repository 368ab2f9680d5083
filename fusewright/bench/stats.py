"""What samples say: medians with their intervals, and ratios of medians with theirs.

Medians and order statistics hold for any distribution, so a few disturbed samples move neither
the figure nor its interval much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_RESAMPLES = 2000
_TAIL = 0.025
_EXACT_COUNT = 200
# Fewer samples have no 95 % interval: all of their range is less.
FEWEST = 6


@dataclass(frozen=True)
class Interval:
    """A figure and the 95 % confidence interval around it."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The interval's width as a share of the figure."""
        return (self.high - self.low) / self.value if self.value else math.inf


def median_interval(samples: Sequence[float]) -> Interval:
    """The median between two order statistics (sign test); below 6 samples, all of the range."""
    ordered = sorted(samples)
    skipped = _skipped(len(ordered))
    return Interval(statistics.median(ordered), ordered[skipped], ordered[-1 - skipped])


def _skipped(count: int) -> int:
    """How many samples on either side lie outside the interval with 95 % confidence."""
    if count > _EXACT_COUNT:
        return max(int((count - 1.96 * math.sqrt(count)) / 2) - 1, 0)
    tail, skipped = 0.0, 0
    for index in range(count // 2):
        tail += math.comb(count, index) / 2**count
        if tail > _TAIL:
            break
        skipped = index
    return skipped


def speedup(baseline: Sequence[float], candidate: Sequence[float], *, seed: int = 0) -> Interval:
    """How many times faster the candidate is, from samples of the same interleaved rounds.

    Whole rounds are drawn, so drift that hit both alike does not widen the interval.
    """
    count = min(len(baseline), len(candidate))
    rounds = torch.tensor([baseline[:count], candidate[:count]], dtype=torch.float64)
    picks = torch.randint(count, (_RESAMPLES, count), generator=_generator(seed))
    ratios = _medians(rounds[0][picks]) / _medians(rounds[1][picks])
    value = statistics.median(baseline) / statistics.median(candidate)
    return _widened(_interval(value, ratios), baseline, candidate)


def change(old: Sequence[float], new: Sequence[float], *, seed: int = 0) -> Interval:
    """New time over old time, from samples of two separate runs."""
    generator = _generator(seed)
    drawn = [
        _medians(values[torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator)])
        for values in (torch.tensor(each, dtype=torch.float64) for each in (old, new))
    ]
    found = _interval(statistics.median(new) / statistics.median(old), drawn[1] / drawn[0])
    return _widened(found, new, old)


def _interval(value: float, draws: Tensor) -> Interval:
    low, high = torch.quantile(draws, torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64))
    return Interval(value, min(float(low), value), max(float(high), value))


def _widened(found: Interval, above: Sequence[float], below: Sequence[float]) -> Interval:
    """All ratios that the samples allow, where one side has too few for a bootstrap."""
    if min(len(above), len(below)) >= FEWEST:
        return found
    return Interval(found.value, min(above) / max(below), max(above) / min(below))


def _medians(rows: Tensor) -> Tensor:
    """Of each row; torch.median alone takes the lower of the two middle values."""
    ordered, count = rows.sort(dim=1).values, rows.shape[1]
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
