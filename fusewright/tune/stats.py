"""Statistics of samples: medians and ratios of medians, with their intervals.

Medians and order statistics hold for any distribution: a few disturbed samples change neither the
figure nor its interval much.
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
# Fewer samples have no 95 % interval: even their whole range is less.
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
    """The median between two order statistics (sign test); below 6 samples, the whole range."""
    ordered = sorted(samples)
    skipped = _skipped(len(ordered))
    return Interval(statistics.median(ordered), ordered[skipped], ordered[-1 - skipped])


def _skipped(count: int) -> int:
    """How many samples on either side are outside the 95 % interval."""
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
    """How many times as fast the candidate is, from samples of the same interleaved rounds.

    Whole rounds are drawn, so drift that affects both equally does not widen the interval.
    """
    count = min(len(baseline), len(candidate))
    rounds = torch.tensor([baseline[:count], candidate[:count]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(count, (_RESAMPLES, count), generator=generator)
    return _ratio(baseline, candidate, _medians(rounds[0][picks]) / _medians(rounds[1][picks]))


def change(old: Sequence[float], new: Sequence[float], *, seed: int = 0) -> Interval:
    """New time over old time, from samples of two separate runs."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        _medians(values[torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator)])
        for values in (torch.tensor(each, dtype=torch.float64) for each in (old, new))
    ]
    return _ratio(new, old, drawn[1] / drawn[0])


def _ratio(above: Sequence[float], below: Sequence[float], draws: Tensor) -> Interval:
    """The ratio of two medians with the interval of its bootstrap `draws`.

    If one side has too few samples for a bootstrap, the interval holds all possible ratios.
    """
    value = statistics.median(above) / statistics.median(below)
    if min(len(above), len(below)) < FEWEST:
        return Interval(value, min(above) / max(below), max(above) / min(below))
    low, high = torch.quantile(draws, torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64))
    return Interval(value, min(float(low), value), max(float(high), value))


def _medians(rows: Tensor) -> Tensor:
    """The median of each row; torch.median would take the lower of two middle values."""
    ordered, count = rows.sort(dim=1).values, rows.shape[1]
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
