"""The CUDA side of replays: a memory pool with its captures, and the order of replays in it.

All graphs of a pool may use the same memory for what they compute, so no two of them run at a time:
a lock orders the threads, an event the streams. Nothing here waits for the GPU.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from fusewright.runtime import library, tensor_cores

Made = TypeVar("Made")
# PyTorch allows one capture at a time in a process, and no replay of another thread meanwhile: both
# need the random generator.
_ONE_AT_A_TIME = threading.RLock()
_MENDING = 3

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
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream: Any = None  # of the last replay
        self._handle = -1
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def begin(self) -> None:
        _ONE_AT_A_TIME.acquire()
        handle = library._fw_stream(self.device.index)
        if handle != self._handle:
            try:
                stream = torch.cuda.current_stream(self.device)
                if self._stream is not None:
                    stream.wait_event(self._event)
            except BaseException:
                _ONE_AT_A_TIME.release()
                raise
            self._handle, self._stream = handle, stream

    def end(self) -> None:
        try:
            self._event.record(self._stream)
        finally:
            _ONE_AT_A_TIME.release()

    def captured(self, build: Callable[[], Made]) -> tuple[Launched, Made]:
        if not self._graphs:  # PyTorch refuses a pool that it has begun to free
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, torch.cuda.device(self.device), torch.cuda.stream(_side(self.device)):
            # This thread's cuBLAS, which no capture could start.
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            # Else two graphs would share cuBLAS's memory of this stream, whatever their pools.
            _clear_cublas()
            try:
                # Other threads may allocate meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                made = build()
                graph.capture_end()
            except BaseException:
                _abandon(graph, self.device, self._pool)
                _mend(self.device)
                raise
            _clear_cublas()
        self._graphs.add(graph)
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


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a capture that failed. PyTorch ends its own part only if CUDA could end its part."""
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None)
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):  # it has ended
        end(device.index, pool)


def _mend(device: torch.device) -> None:
    """Let the random generator go on after a capture that failed: it still waits for the end.

    An empty capture ends that. It may fail itself, because CUDA reports an error of the failed one
    late. At last the generator gets a new state with the same numbers.
    """
    generator = torch.cuda.default_generators[device.index]
    for _ in range(_MENDING):
        pool, empty = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty
            try:
                empty.capture_begin(pool=pool, capture_error_mode="thread_local")
                empty.capture_end()
            except RuntimeError:
                _abandon(empty, device, pool)
        if _draws(generator, device):
            return
    generator.graphsafe_set_state(generator.clone_state())


def _draws(generator: torch.Generator, device: torch.device) -> bool:
    """Whether random numbers can be drawn. The generator stays as it is."""
    before = generator.get_state()
    try:
        torch.empty(1, device=device).uniform_(generator=generator)
    except RuntimeError:
        return False
    generator.set_state(before)
    return True
