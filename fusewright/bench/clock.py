"""How long one call takes, from a state in which the caches hold none of its data.

On a GPU two times are taken: to an event on the current stream, and to one behind a full device
synchronisation. The second holds work that a candidate put on another stream; where there is none,
the first one is the more exact. Which it is, looks tell: a call and, right after it, as much work
on the current stream alone, for a synchronisation takes the longer to return the longer it waits.
Other streams do not wait for the flush, so whoever uses them is timed from an idle device
(`exposed`), where nothing can be done before the clock starts. All others find the device busy for
as long as their calls take to return (`keep_busy`): a slow host is no kernel's fault.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fusewright.bench.record import ClockFacts

_EMPTY_CALLS = 30
# On a CPU every sample pays for this, and a shared third-level cache may be far larger.
_MOST_HOST_FLUSH_BYTES = 64 * 2**20
# A virtual machine wakes from a synchronisation some microseconds earlier or later.
_GAP_US = 5.0
_LEAST_BUSY_US, _MOST_BUSY_US = 200.0, 50e3
_GAP_SHARE = 0.02


@dataclass(frozen=True)
class Sample:
    """One call: until the current stream was done, and until the whole device was."""

    stream_us: float
    device_us: float
    call_us: float = 0.0  # until it returned to the host

    @property
    def gap_us(self) -> float:
        """From the end of the stream's work until the host has heard of the device's."""
        return self.device_us - self.stream_us


@dataclass(frozen=True)
class Look:
    """A call from an idle device, and work of that length that all was on the current stream."""

    call: Sample
    honest: Sample


class Clock(Protocol):
    """Times calls, and says how."""

    @property
    def facts(self) -> ClockFacts: ...

    def flush(self) -> None: ...

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample: ...

    def look(self, call: Callable[[], object]) -> Look: ...

    def keep_busy(self, call_us: float) -> float: ...


def make_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else WallClock()


class WallClock:
    """Wall-clock time on a CPU, after a write over the caches."""

    def __init__(self) -> None:
        cache = host_cache_bytes()
        flush = min(2 * cache, _MOST_HOST_FLUSH_BYTES)
        self.facts = ClockFacts("wall clock", cache, flush, 0.0)
        self._cover = _Cover(flush, torch.device("cpu"))

    def flush(self) -> None:
        self._cover.write()

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        self._cover.write()
        start = time.perf_counter()
        result = call()
        took = (time.perf_counter() - start) * 1e6
        del result  # Freed after the clock was read: its memory is the caller's to keep.
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
        self._cover = _Cover(2 * cache + 2**20, device)
        self._writes = 1
        gaps = [self.sample(_nothing) for _ in range(_EMPTY_CALLS)]
        idle = statistics.median(each.gap_us for each in gaps)
        writes = [self.sample(self._cover.write) for _ in range(_EMPTY_CALLS)]
        self._write_us = max(statistics.median(each.stream_us for each in writes), 1.0)
        self.facts = ClockFacts("device events", cache, self._cover.bytes, idle)

    def flush(self) -> None:
        self._cover.write()

    def keep_busy(self, call_us: float) -> float:
        """From now on the device writes at least so long before the clock starts; gives how long.

        A host is now and then slower than it usually is: half as much again, and short calls more.
        """
        wanted = min(max(1.5 * call_us, _LEAST_BUSY_US), _MOST_BUSY_US)
        self._writes = max(1, math.ceil(wanted / self._write_us))
        return self._writes * self._write_us

    def sample(self, call: Callable[[], object], *, exposed: bool = False) -> Sample:
        begin, end, last = _event(), _event(), _event()
        torch.cuda.synchronize(self._device)
        # The flush also keeps the GPU busy while the call's kernels are being launched.
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


def settle(
    samples: Sequence[Sample], looks: Sequence[Look], facts: ClockFacts
) -> tuple[list[float], str]:
    """The times that count, and which they are: stream, device or wall."""
    stream = [each.stream_us for each in samples]
    if facts.kind == "wall clock":
        return stream, "wall"
    if not hides_work(looks):
        return stream, "stream"
    gap = statistics.median(each.honest.gap_us for each in looks)
    return [max(each.device_us - gap, each.stream_us) for each in samples], "device"


def hides_work(looks: Sequence[Look]) -> bool:
    """Whether the device is busy for longer than the current stream is."""
    more = statistics.median(each.call.gap_us - each.honest.gap_us for each in looks)
    usual = statistics.median(each.call.device_us for each in looks)
    return more > max(_GAP_US, _GAP_SHARE * usual)


class _Cover:
    """A buffer that is written with another value each time, so that no old line is still there."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = size
        self._buffer: Tensor = torch.empty(size // 4, dtype=torch.int32, device=device)
        self._count = 0

    def write(self) -> None:
        self._count += 1
        self._buffer.fill_(self._count)


def host_cache_bytes() -> int:
    """The largest cache of the first processor, or 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 * 2**20)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _nothing() -> None:
    return None
