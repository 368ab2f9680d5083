"""Costs besides the time of a call: builds, memory, and Python between the kernels."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusewright.bench.subjects import BenchSubject
from fusewright.problem.inputs import named_tensors
from fusewright.problem.nested import map_leaves
from fusewright.verify.feeds import Feed

_HOST_CALLS = 30
_WARM_UPS = 5
_CACHES = {
    "FUSEWRIGHT_CACHE": "fusewright",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
}


@contextmanager
def empty_caches() -> Iterator[None]:
    """Use new, empty folders for all caches of compiled code, so that builds are cold."""
    before = {name: os.environ.get(name) for name in _CACHES}
    with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder:
        for name, leaf in _CACHES.items():
            os.environ[name] = f"{folder}/{leaf}"
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def build_seconds(subject: BenchSubject, passes: Sequence[str]) -> float:
    """Seconds of the first call of every pass, until the device is done."""
    start = time.perf_counter()
    for name in passes:
        subject.prepare(name == "train")
    if any(each.is_cuda for _, each in named_tensors(subject.feed.slots[0])):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The peak device memory of one call, without the memory that was in use before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return int(torch.cuda.max_memory_allocated(device)) - before


def overhead(subject: BenchSubject, device: torch.device) -> tuple[float | None, str]:
    """Microseconds of Python and launching per forward call, and how they were measured."""
    if device.type == "cuda":
        return _host_us(lambda: subject.call(False, 0), device), "until the call returns"
    if subject.candidate.kind in ("compile", "max-autotune"):
        return None, ""  # compiling another size takes minutes
    for rows in (1, 2):  # batch statistics need two
        own, subject.feed = subject.feed, _smallest(subject.feed, rows)
        try:
            return _host_us(lambda: subject.call(False, 0), device), f"batch of {rows}"
        except Exception:  # the model may refuse this batch size
            continue
        finally:
            subject.feed = own
    return None, ""


def _host_us(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_WARM_UPS + _HOST_CALLS):
        start = time.perf_counter()
        result = call()
        times.append((time.perf_counter() - start) * 1e6)
        del result
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return statistics.median(times[_WARM_UPS:])


def _smallest(feed: Feed, rows: int) -> Feed:
    """The feed with only the first rows of each tensor that has as many rows as the first one."""
    tensors = [each for _, each in named_tensors(feed.slots[0]) if each.dim()]
    batch = tensors[0].shape[0] if tensors else 0

    def cut(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch:
            return leaf.detach()[:rows].clone()
        return leaf

    return Feed((tuple(map_leaves(cut, each) for each in feed.slots[0]),), seed=0, gradients=False)
