"""Calls in PyTorch's profiler: which kernels ran, for how long, and for which step of our plan.

The profiler's exported trace is read as JSON. A kernel belongs to the call (for our own kernels, to
the entry point) in whose span it was launched. On a CPU nothing is launched, and the spans
themselves are the times.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from fusewright.bench.record import KernelTime

_CALL = "fusewright.call"
_ENTRY = "fusewright.kernel "
_CALLS = 5
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Operators that only reinterpret or reserve memory are no work on a CPU.
_FREE = frozenset(
    f"aten::{name}"
    for name in "alias as_strided detach empty empty_like empty_strided expand permute reshape "
    "resolve_conj resolve_neg select slice squeeze t transpose unsqueeze view _unsafe_view "
    "lift_fresh".split()
)


@dataclass(frozen=True)
class Span:
    """A stretch of time on one thread: an operator, one of our entry points, or a call."""

    name: str
    start: float
    end: float
    thread: object

    def holds(self, moment: float) -> bool:
        return self.start <= moment <= self.end


@dataclass(frozen=True)
class Work:
    """Work that took time within a call. `owner` is the top-level operator or entry point.

    `turn` numbers the owner's spans from 0, to tell the first addmm from the second.
    """

    name: str
    time_us: float
    owner: str
    turn: int


@dataclass(frozen=True)
class Trace:
    """All work of `calls` calls; `turns` counts the spans of each owner over all calls."""

    calls: int
    work: tuple[Work, ...]
    turns: Mapping[str, int]
    peak_bytes: int | None


def trace_calls(
    call: Callable[[], object], renew: Callable[[], object], model: nn.Module, *, on_gpu: bool
) -> Trace:
    """Profile a few calls; `renew` runs before each of them and is not counted."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with annotated(model), tempfile.TemporaryDirectory() as folder:
        call()
        with profile(activities=activities, profile_memory=not on_gpu) as profiler:
            for _ in range(_CALLS):
                renew()
                with record_function(_CALL):
                    call()
                if on_gpu:
                    torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    if on_gpu and not any(each.get("cat") in _DEVICE_WORK for each in events):
        raise RuntimeError("PyTorch's profiler saw no kernel on the GPU (is CUPTI allowed here?)")
    return read_trace(events)


def read_trace(events: Sequence[Mapping[str, Any]]) -> Trace:
    """The work within the calls, from the events of an exported trace."""
    spans = [_span(each) for each in events if each.get("cat") in ("cpu_op", "user_annotation")]
    calls = [each for each in spans if each.name == _CALL]
    inside = [each for each in spans if any(call.holds(each.start) for call in calls)]
    owners = list(_numbered(_top_level(inside)))
    device = [each for each in events if each.get("cat") in _DEVICE_WORK]
    if device:
        work = tuple(_launched(device, events, calls, owners))
    else:
        work = tuple(
            Work(span.name, span.end - span.start, span.name, turn)
            for span, turn in owners
            if span.name not in _FREE
        )
    turns = Counter(span.name for span, _ in owners)
    return Trace(len(calls), work, turns, _peak_bytes(events, calls))


def kernel_times(trace: Trace) -> tuple[KernelTime, ...]:
    """Launches and time per call of each kernel name, the longest first."""
    sums: dict[str, list[float]] = defaultdict(list)
    for each in trace.work:
        sums[each.name].append(each.time_us)
    rows = [
        KernelTime(name, len(times) / trace.calls, sum(times) / trace.calls)
        for name, times in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_us))


def launches(trace: Trace) -> float:
    """Kernels, copies and fills per call; on a CPU, top-level operators and our kernels."""
    return len(trace.work) / trace.calls if trace.calls else 0.0


@contextmanager
def annotated(model: nn.Module) -> Iterator[None]:
    """Make our entry points visible to the profiler by name. Other modules are not changed."""
    kernels = getattr(sys.modules.get(type(model).__module__), "_fw_kernels", None)
    before = list(_entries(vars(kernels))) if kernels is not None else []

    def named(name: str, entry: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            with record_function(_ENTRY + name):
                return entry(*args)

        return run

    for name, holder, key, entry in before:
        holder[key] = named(name, entry)
    try:
        yield
    finally:
        for _, holder, key, entry in before:
            holder[key] = entry


def _entries(held: dict[str, Any]) -> Iterator[tuple[str, dict[Any, Any], Any, Any]]:
    """Each bound entry point: its name, the dict that holds it, its key and itself. If PyTorch's
    flags decide its precision, there is one for each number of terms."""
    for name in held.get("_entries", {}):
        each = held.get(name)
        if isinstance(each, dict):
            yield from ((name, each, terms, entry) for terms, entry in each.items())
        elif callable(each):
            yield name, held, name, each


def owner_of(step_name: str, operators: Sequence[str]) -> str:
    """A step's name in the trace: that of our entry point or of the ATen operator."""
    if operators and operators[0].startswith("aten."):
        return "aten::" + operators[0].split(".")[1]
    return _ENTRY + step_name


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(event["name"], start, start + float(event.get("dur", 0.0)), event.get("tid"))


def _top_level(spans: Sequence[Span]) -> Iterator[Span]:
    """Operators and entry points that are not inside another one, in the order of their start."""
    ours = [each for each in spans if each.name.startswith(("aten::", _ENTRY, "triton_"))]
    ends: dict[object, float] = {}
    for each in sorted(ours, key=lambda span: (span.start, -span.end)):
        if each.start >= ends.get(each.thread, -1.0):
            ends[each.thread] = each.end
            yield each


def _numbered(spans: Iterator[Span]) -> Iterator[tuple[Span, int]]:
    turns: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return ((each, next(turns[each.name])) for each in spans)


def _launched(
    device: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    calls: Sequence[Span],
    owners: Sequence[tuple[Span, int]],
) -> Iterator[Work]:
    """Device work that was launched within a call, with the operator that launched it."""
    launched = {
        each["args"]["correlation"]: float(each["ts"])
        for each in events
        if each.get("cat") in _LAUNCHES and "correlation" in each.get("args", {})
    }
    for each in sorted(device, key=lambda event: float(event["ts"])):
        moment = launched.get(each.get("args", {}).get("correlation"), -1.0)
        # Backward launches from its own thread while the caller's thread waits, so the moment of
        # the launch decides whose it was.
        if any(call.holds(moment) for call in calls):
            holders = ((s, t) for s, t in owners if s.holds(moment))
            span, turn = next(holders, (None, 0))
            yield Work(each["name"], float(each["dur"]), span.name if span else "", turn)


def _peak_bytes(events: Sequence[Mapping[str, Any]], calls: Sequence[Span]) -> int | None:
    """The peak host memory of the last call beyond its start; None without memory events."""
    found = [
        (float(each["ts"]), int(each["args"]["Bytes"]))
        for each in events
        if each.get("name") == "[memory]" and each["args"].get("Device Type") == 0
    ]
    if not found or not calls:
        return None
    sizes = (size for moment, size in sorted(found) if calls[-1].holds(moment))
    return max(itertools.accumulate(sizes, initial=0))
