"""The times of several calls, measured in turns.

On a GPU it is the time between two events on the current stream, after the L2 cache was
overwritten. On a CPU it is wall-clock time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fusewright.problem.inputs import resolve_device

_WARM_UPS = 2
_MOST_ROUNDS = 200
# On a CPU every sample pays for the flush, and a shared L3 cache may be far larger.
_MOST_HOST_FLUSH_BYTES = 64 * 2**20
_FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache (H200: 50 MiB)


@dataclass(frozen=True)
class _Clock:
    flush: Tensor | None

    def ms(self, call: Callable[[], object]) -> float:
        if self.flush is None:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = device_event(), device_event()
        # The flush also keeps the GPU busy while the call is being launched.
        self.flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def device_event() -> torch.cuda.Event:
    """An event on a stream that records the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_ms(
    candidates: Mapping[str, Callable[[], object]], *, device: str | torch.device, budget_s: float
) -> Mapping[str, float]:
    """The median milliseconds of each call. All take turns until the budget is spent."""
    taken = samples_ms(candidates, device=device, budget_s=budget_s)
    return {name: statistics.median(each) for name, each in taken.items()}


def samples_ms(
    candidates: Mapping[str, Callable[[], object]],
    *,
    device: str | torch.device,
    budget_s: float,
    least_rounds: int = 1,
) -> dict[str, list[float]]:
    """The milliseconds of each call in each round."""
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=where) if on_gpu else None
    clock = _Clock(flush)
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for call in candidates.values():
        for _ in range(_WARM_UPS):
            call()
    start = time.perf_counter()
    for round_ in range(_MOST_ROUNDS):
        # Every second round runs in reverse, so that no call always follows the same other one.
        for name in names if round_ % 2 == 0 else reversed(names):
            samples[name].append(clock.ms(candidates[name]))
        if round_ + 1 >= least_rounds and time.perf_counter() - start > budget_s:
            break
    return samples


class Cover:
    """A buffer that is overwritten with a new value each time, to replace all cache lines."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = size
        self._buffer: Tensor = torch.empty(size // 4, dtype=torch.int32, device=device)
        self._count = 0

    def write(self) -> None:
        self._count += 1
        self._buffer.fill_(self._count)


def host_cache_bytes() -> int:
    """The largest cache of the first processor, or 32 MiB if the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 * 2**20)


def host_flush_bytes() -> int:
    """How much to overwrite so that the caches hold nothing else."""
    return min(2 * host_cache_bytes(), _MOST_HOST_FLUSH_BYTES)
