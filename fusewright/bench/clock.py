"""How long one call takes when the caches hold none of its data.

On a GPU two times are taken: until an event on the current stream, and until an event after a full
device synchronization. The second includes work on other streams. Without such work the first is
more exact. Looks decide which one counts: a call, and right after it as much work on the current
stream alone, because a synchronization that waits longer also takes longer to return.

Other streams do not wait for the flush. A candidate that uses them is timed from an idle device
(`exposed`), so that it cannot work before the clock starts. For all others the device is busy for
as long as their calls take to return (`keep_busy`), so that a slow host does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusewright.bench.record import ClockFacts
from fusewright.tune.timing import Cover, device_event, host_cache_bytes, host_flush_bytes

_EMPTY_CALLS = 30
# In a virtual machine a synchronization returns some microseconds earlier or later.
_GAP_US = 5.0
_LEAST_BUSY_US, _MOST_BUSY_US = 200.0, 50e3
_GAP_SHARE = 0.02


@dataclass(frozen=True)
class Sample:
    """One call: the time until the current stream was done, and until the whole device was."""

    stream_us: float
    device_us: float
    call_us: float = 0.0  # until it returned to the host

    @property
    def gap_us(self) -> float:
        """From the end of the stream's work until the host knows that the device is idle."""
        return self.device_us - self.stream_us


@dataclass(frozen=True)
class Look:
    """A call from an idle device, and equally long work on the current stream alone."""

    call: Sample
    honest: Sample


class WallClock:
    """Wall-clock time on a CPU, after a write over the caches."""

    def __init__(self) -> None:
        cache = host_cache_bytes()
        flush = host_flush_bytes()
        self.facts = ClockFacts("wall clock", cache, flush, 0.0)
        self._cover = Cover(flush, torch.device("cpu"))

    def flush(self) -> None:
        self._cover.write()

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        self._cover.write()
        start = time.perf_counter()
        result = call()
        took = (time.perf_counter() - start) * 1e6
        del result  # freeing the result is not timed
        return Sample(took, took)

    def look(self, call: Callable[[], object]) -> Look:
        seen = self.sample(call)
        return Look(seen, seen)

    def keep_busy(self, call_us: float) -> float:
        return 0.0


class DeviceClock:
    """Device events, with the device idle before and after, and a write over the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._device = device
        self._cover = Cover(2 * cache + 2**20, device)
        self._writes = 1
        gaps = [self.sample(lambda: None) for _ in range(_EMPTY_CALLS)]
        idle = statistics.median(each.gap_us for each in gaps)
        writes = [self.sample(self._cover.write) for _ in range(_EMPTY_CALLS)]
        self._write_us = max(statistics.median(each.stream_us for each in writes), 1.0)
        self.facts = ClockFacts("device events", cache, self._cover.bytes, idle)

    def flush(self) -> None:
        self._cover.write()

    def keep_busy(self, call_us: float) -> float:
        """Keep the device busy before each sample; returns for how many microseconds.

        The margin is half of a call's usual host time, and more for short calls, because a host is
        sometimes slower than usual.
        """
        wanted = min(max(1.5 * call_us, _LEAST_BUSY_US), _MOST_BUSY_US)
        self._writes = max(1, math.ceil(wanted / self._write_us))
        return self._writes * self._write_us

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        begin, end, last = device_event(), device_event(), device_event()
        torch.cuda.synchronize(self._device)
        # The flush also keeps the GPU busy while the host launches the call's kernels.
        for _ in range(1 if exposed else self._writes):
            self._cover.write()
        if exposed:
            torch.cuda.synchronize(self._device)
        begin.record()
        start = time.perf_counter()
        result = call()
        call_us = (time.perf_counter() - start) * 1e6
        end.record()
        torch.cuda.synchronize(self._device)
        last.record()
        last.synchronize()
        del result
        return Sample(begin.elapsed_time(end) * 1e3, begin.elapsed_time(last) * 1e3, call_us)

    def look(self, call: Callable[[], object]) -> Look:
        seen = self.sample(call, exposed=True)
        return Look(seen, self.sample(lambda: self._write(seen.device_us), exposed=True))

    def _write(self, length_us: float) -> None:
        for _ in range(math.ceil(length_us / self._write_us)):
            self._cover.write()


Clock = WallClock | DeviceClock


def make_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else WallClock()


def settle(
    samples: Sequence[Sample], looks: Sequence[Look], facts: ClockFacts
) -> tuple[list[float], str]:
    """The times that count, and their kind: stream, device or wall."""
    stream = [each.stream_us for each in samples]
    if facts.kind == "wall clock":
        return stream, "wall"
    if not hides_work(looks):
        return stream, "stream"
    gap = statistics.median(each.honest.gap_us for each in looks)
    return [max(each.device_us - gap, each.stream_us) for each in samples], "device"


def hides_work(looks: Sequence[Look]) -> bool:
    """Whether other streams work after the current one is done."""
    more = statistics.median(each.call.gap_us - each.honest.gap_us for each in looks)
    usual = statistics.median(each.call.device_us for each in looks)
    return more > max(_GAP_US, _GAP_SHARE * usual)
