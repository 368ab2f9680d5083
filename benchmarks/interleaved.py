"""Times of several calls in one run, with the clock of `fusewright bench`.

The calls take turns in a new random order each round. Before each call the L2 cache is overwritten,
and the GPU is kept busy until the slowest call has returned. So the device time contains no host
time. The host time of a call is measured separately.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fusewright.bench.clock import DeviceClock, Sample

WARM_UPS = 4
ROUNDS = 15
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Times:
    """Medians of the GPU time, and of the time until the call returned."""

    device_ms: float
    call_ms: float


def interleaved(
    calls: Mapping[Name, Callable[[], object]], clock: DeviceClock
) -> dict[Name, Times]:
    """The median of each call's times, by its name."""
    warm = {name: [clock.sample(call) for _ in range(WARM_UPS)] for name, call in calls.items()}
    clock.keep_busy(max(each[-1].call_us for each in warm.values()))
    found: dict[Name, list[Sample]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for name in order.sample(list(calls), len(calls)):
            found[name].append(clock.sample(calls[name]))
    return {
        name: Times(
            statistics.median(each.stream_us for each in samples) / 1e3,
            statistics.median(each.call_us for each in samples) / 1e3,
        )
        for name, samples in found.items()
    }
