"""A GPU in the candidate's process: memory that the judge owns, and a clock that it trusts.

Everything here is loaded before the candidate. The clock calls the driver itself, so no function of
PyTorch that a file could replace has a part in it. All streams are drained before the clock starts
and before it stops. Inputs are staged elsewhere and come to their place when the clock runs, so
that a thread which waits for them cannot begin early; an empty request pays for the same copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from fusewright.judge.arena import Arena
from fusewright.judge.device import Results
from fusewright.judge.guarded import GUARD, Form, Guarded, room
from fusewright.tune.timing import Cover

_MIB = 1 << 20
# As glibc fills memory on the host: -1.7e38 in float32.
_POISON, _BLOCKS, _LARGE = 0xFE, 2, 1 << 28
# About a millisecond, in which the host gets through a call.
_BUSY_COVERS = 40


OnStream = Callable[[], AbstractContextManager[object]]


def _streams(device: torch.device) -> tuple[OnStream, OnStream]:
    """The default stream, and one that does not wait for it."""
    if device.type != "cuda":
        return nullcontext, nullcontext
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    streams = (torch.cuda.default_stream(device), other)
    usual, aside = (partial(torch.cuda.stream, each) for each in streams)
    return usual, aside


class Clock(Protocol):
    """Moments on the default stream of one device."""

    def drain(self) -> None:
        """Wait until no stream of the device has work left."""
        ...

    def mark(self) -> object:
        """The moment when the default stream has done all that it was given so far."""
        ...

    def elapsed_us(self, first: object, last: object) -> float: ...

    def forget(self, moment: object) -> None: ...


class DriverClock:
    """The CUDA driver's own events, on the default stream."""

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._synchronize = driver.cuCtxSynchronize
        self._create, self._record = driver.cuEventCreate, driver.cuEventRecord
        self._elapsed, self._destroy = driver.cuEventElapsedTime, driver.cuEventDestroy_v2
        pointer = ctypes.c_void_p
        self._create.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
        self._record.argtypes = [pointer, pointer]
        self._elapsed.argtypes = [ctypes.POINTER(ctypes.c_float), pointer, pointer]
        self._destroy.argtypes = [pointer]

    def drain(self) -> None:
        _require(self._synchronize(), "cuCtxSynchronize")

    def mark(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        _require(self._create(ctypes.byref(event), 0), "cuEventCreate")
        _require(self._record(event, None), "cuEventRecord")
        return event

    def elapsed_us(self, first: object, last: object) -> float:
        found = ctypes.c_float()
        _require(self._elapsed(ctypes.byref(found), first, last), "cuEventElapsedTime")
        return float(found.value) * 1e3

    def forget(self, moment: object) -> None:
        self._destroy(moment)


def _require(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refuses {what}: error {code}")


class CudaPlaced:
    """Device memory for one tensor, a stage beside it, and the judge's memory on the host."""

    def __init__(self, host: Tensor, form: Form, device: torch.device, shift: int) -> None:
        self._host = host
        self._stage = torch.empty(room(form), dtype=torch.uint8, device=device)
        self._guarded = Guarded(form, torch.empty_like(self._stage), shift)
        self._copy = Tensor.copy_

    def view(self) -> Tensor:
        return self._guarded.view()

    def stage(self) -> None:
        """Bring the judge's bytes to the device, where the candidate does not look."""
        self._copy(self._stage, self._host)

    def load(self) -> None:
        """Values and guard zones come to their place."""
        self._copy(self._guarded.memory, self._stage)

    def store(self) -> None:
        """Show the judge what became of them."""
        self._copy(self._host, self._guarded.memory)


class Cuda:
    """One GPU; `device` and `clock` can be others in tests."""

    kind = "cuda"
    is_separate = True

    def __init__(self, device: torch.device, clock: Clock, cover: Callable[[], None]) -> None:
        self._device, self._clock, self._cover = device, clock, cover
        self._begin: object = None
        self._generator, self._state = torch.default_generator, torch.cuda.get_rng_state
        self._seed, self._clone, self._without = torch.manual_seed, Tensor.clone, torch.no_grad
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._sizes: tuple[int, ...] = ()
        self._zones: list[Tensor] = []
        self._full = torch.full
        self._reset_peak = torch.cuda.reset_peak_memory_stats
        self._allocated = torch.cuda.memory_allocated
        self._peak, self._held = torch.cuda.max_memory_allocated, 0
        self.kind = device.type
        self._on_usual, self._on_other = _streams(device)
        self._on_current: OnStream = self._on_usual

    def moved(self, model: nn.Module) -> nn.Module:
        return model.to(self._device)

    def guarded(self, form: Form) -> Guarded:
        return Guarded(form, self._filled(room(form), GUARD))

    def placed(self, arena: Arena, offset: int, form: Form, shift: int = 0) -> CudaPlaced:
        return CudaPlaced(arena.bytes_at(offset, room(form)), form, self._device, shift)

    def seed(self, number: int) -> None:
        self._seed(number)

    def random_state(self) -> Tensor:
        host = self._generator.get_state()
        on_gpu = self._device.type == "cuda"
        return torch.cat([host, self._state(self._device)]) if on_gpu else host

    def poison(self, wanted: bool) -> None:
        """Results will lie where these blocks did: the caching allocator takes the last ones.

        Between them lie others that stay, so that a kernel which writes beyond its result is seen.
        """
        self._zones = []
        if not wanted:
            return
        blocks = []
        for size in self._sizes:
            for _ in range(_BLOCKS):
                blocks.append(self._filled(size, _POISON))
                self._zones.append(self._filled(min(size, _MIB), GUARD))
        del blocks

    def _filled(self, size: int, value: int) -> Tensor:
        return self._full((size,), value, dtype=torch.uint8, device=self._device)

    def damaged(self) -> list[str]:
        return [] if all(bool((each == GUARD).all()) for each in self._zones) else ["a result"]

    @contextmanager
    def aside(self, wanted: bool) -> Iterator[None]:
        """With another current stream: who launches on the default one is found out."""
        if not wanted:
            yield
            return
        self._on_current = self._on_other
        try:
            with self._on_current():
                yield
        finally:
            self._on_current = self._on_usual

    def start(self, *, busy: bool) -> None:
        """From an idle device, with nothing of the call in its caches."""
        self._cover()
        self._clock.drain()
        if self._device.type == "cuda":
            self._reset_peak(self._device)
            self._held = self._allocated(self._device)
        self._begin = self._clock.mark()
        for _ in range(_BUSY_COVERS if busy else 0):
            self._cover()

    def stop(self, results: Results) -> dict[str, float]:
        """Until the default stream was done, and until all streams were.

        Before anything waits, the default stream copies all results: whoever works on another
        stream and does not tell the default one is found out. The copies do not count.
        """
        end = self._clock.mark()
        on_gpu = self._device.type == "cuda"
        peak_bytes = self._peak(self._device) - self._held if on_gpu else 0
        peak = {"peak_bytes": peak_bytes, "held_bytes": self._held} if on_gpu else {}
        self._seen = self._copies(results)
        copied = self._clock.mark()
        self._clock.drain()
        last = self._clock.mark()
        self._clock.drain()
        between = self._clock.elapsed_us
        stream_us = between(self._begin, end)
        found = {
            "stream_us": stream_us,
            "device_us": max(between(self._begin, last) - between(end, copied), stream_us),
        }
        for each in (self._begin, end, copied, last):
            self._clock.forget(each)
        return {**found, **peak}

    def _copies(self, results: Results) -> dict[int, tuple[Tensor, Tensor]]:
        with self._without(), self._on_current():
            mine = [each for each in results() if each.device.type == self._device.type]
            self._sizes = tuple({max(each.nbytes, 1) for each in mine if each.nbytes < _LARGE})
            return {id(each): (each, self._clone(each)) for each in mine}

    def seen(self, tensor: Tensor) -> Tensor:
        """A result as the default stream found it."""
        known, copy = self._seen.get(id(tensor), (None, tensor))
        return copy if known is tensor else tensor


def make_cuda() -> Cuda:
    """The first GPU that this process sees."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)  # makes the context of this thread
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return Cuda(device, DriverClock(), Cover(2 * cache + _MIB, device).write)
