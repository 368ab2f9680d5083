"""The CUDA side of replays: a memory pool with its captures, and the order of replays in it.

All graphs of a pool may use the same memory for what they compute, so no two of them run at a time:
a lock orders the threads, an event the streams. Nothing here waits for the GPU.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from fusewright.runtime import library, tensor_cores

Made = TypeVar("Made")
# PyTorch allows one capture at a time in a process.
_ONE_CAPTURE = threading.Lock()

# Settings of PyTorch that decide which kernels run. A graph is for one value of each.
_GETTERS = tuple(
    getter
    for name in (
        "_get_cudnn_enabled",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_deterministic_algorithms",
        "_get_deterministic_fill_uninitialized_memory",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_cudnn_sdp_enabled",
    )
    if (getter := getattr(torch._C, name, None)) is not None
)


class Launched(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...


class Memory(Protocol):
    """Where the graphs of one module live on one device."""

    def begin(self) -> None:
        """Until `end`, no other graph of this memory runs, in any thread or stream."""

    def end(self) -> None: ...

    def captured(self, build: Callable[[], Made]) -> tuple[Launched, Made]:
        """The work that `build` submits, as a graph. What it allocates belongs to this memory."""
        ...


class Machine(Protocol):
    """What replays ask of the machine."""

    def is_capturing(self) -> bool: ...

    def flags(self) -> tuple[object, ...]: ...

    def memory(self, device: torch.device) -> Memory: ...


class CudaMachine:
    """GPUs. Each has one memory for the module that holds this object."""

    def __init__(self) -> None:
        self._memories: dict[torch.device, CudaMemory] = {}
        self.is_capturing = torch.cuda.is_current_stream_capturing

    def flags(self) -> tuple[object, ...]:
        """Takes 1 µs."""
        precise = (tensor_cores._fw_terms(), tensor_cores._fw_conv_terms())
        return (*precise, *[getter() for getter in _GETTERS])

    def memory(self, device: torch.device) -> CudaMemory:
        return self._memories.setdefault(device, CudaMemory(device))


class CudaMemory:
    """A pool of PyTorch's allocator. It goes back with the last graph that was captured into it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream: Any = None  # of the last replay
        self._handle = -1
        self._pool: Any = None

    def begin(self) -> None:
        self._lock.acquire()
        handle = library._fw_stream(self.device.index)
        if handle != self._handle:
            try:
                stream = torch.cuda.current_stream(self.device)
                if self._stream is not None:
                    stream.wait_event(self._event)
            except BaseException:
                self._lock.release()
                raise
            self._handle, self._stream = handle, stream

    def end(self) -> None:
        try:
            self._event.record(self._stream)
        finally:
            self._lock.release()

    def captured(self, build: Callable[[], Made]) -> tuple[Launched, Made]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _ONE_CAPTURE, torch.cuda.device(self.device), torch.cuda.stream(_side(self.device)):
            # Else two graphs would share cuBLAS's memory of this stream, whatever their pools.
            _clear_cublas()
            # Other threads may allocate meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = build()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                _mend(self.device, self._pool)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                _mend(self.device, self._pool)
                raise
            _clear_cublas()
        return graph, made


_SIDES: dict[torch.device, Any] = {}


def _side(device: torch.device) -> Any:
    """The stream on which captures are made."""
    if device not in _SIDES:
        _SIDES[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _SIDES[device]


def _clear_cublas() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _mend(device: torch.device, pool: Any) -> None:
    """Let allocator and random generator go on after a capture that failed.

    PyTorch ends their part of a capture only if CUDA could end its own. An empty capture ends that
    of the generator.
    """
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):  # it has ended
            end(device.index, pool)
    empty = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # that the graph is empty
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()
