"""The peak memory of a call: how much more the process holds at its worst moment.

On a CPU the kernel counts it, for a candidate from outside its process. Every process has a mark of
the most memory that it held, which can be reset. On a GPU PyTorch's allocator counts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_RESET_PEAK = b"5"
_KIB = 1 << 10
# A call may take twice eager's peak. Stacks of threads and the like come to a few MiB.
_OF_EAGER = 2.0
_NO_LEAK_BYTES = 1 << 24
_SLACK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 22}


def gives_back() -> Callable[[], None]:
    """A function by which this process gives free memory back, so that its next use counts."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def give_back() -> None:
        if found is not None:
            found(0)

    return give_back


class PeakOf:
    """The peak of some processes since now; None if the kernel does not tell it."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._before: dict[int, int] = {}
        self._known = True
        for pid in pids:
            try:
                Path(f"/proc/{pid}/clear_refs").write_bytes(_RESET_PEAK)
                self._before[pid] = _held(pid, "VmRSS")
            except OSError:
                self._known = False

    @property
    def held(self) -> int | None:
        """What they held before."""
        return sum(self._before.values()) if self._known else None

    def taken(self, pids: Iterable[int]) -> int | None:
        if not self._known:
            return None
        return sum(_held(pid, "VmHWM") - self._before.get(pid, 0) for pid in pids)


class OwnPeak:
    """The peak of this process. It is made while the process may still be looked into."""

    def __init__(self) -> None:
        self._give_back = gives_back()
        self._reset = -1
        with suppress(OSError):
            self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._reset >= 0:
            os.close(self._reset)

    def of(self, call: Callable[[], object], device: torch.device) -> int | None:
        """What a call takes, with the results that it returns."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            call()
            torch.cuda.synchronize(device)
            return int(torch.cuda.max_memory_allocated(device)) - before
        if self._reset < 0:
            return None
        self._give_back()
        os.write(self._reset, _RESET_PEAK)
        held = _held(os.getpid(), "VmRSS")
        call()
        return _held(os.getpid(), "VmHWM") - held


def _held(pid: int, name: str) -> int:
    """A figure of a process in bytes; 0 if it has ended."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        figure = next(each for each in lines if each.startswith(f"{name}:"))
        return int(figure.split()[1]) * _KIB
    return 0


@contextmanager
def own_peak() -> Iterator[OwnPeak]:
    found = OwnPeak()
    try:
        yield found
    finally:
        found.close()


def is_kept(grown: int, calls: int, call_bytes: int) -> bool:
    """Whether so many calls left memory behind, beyond what a process takes anyway."""
    return grown > max(_NO_LEAK_BYTES, calls * call_bytes // 2)


def is_too_much(mine: int, eager: int, kind: str) -> bool:
    return mine > _OF_EAGER * eager + _SLACK_BYTES.get(kind, _SLACK_BYTES["cpu"])
