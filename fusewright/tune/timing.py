"""The times of several calls, measured in turns.

On a GPU it is the time between two events on the current stream, after the L2 cache was
overwritten. On a CPU it is wall-clock time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusewright.problem.inputs import resolve_device

_WARM_UPS = 2
_MOST_ROUNDS = 200
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
