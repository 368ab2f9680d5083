"""The physical floor: the bytes that a call must read and write, at this machine's best speed.

An element of an input or a weight must be read if the gradient with respect to it is not zero. All
outputs must be written. The rate is the best that a copy reaches, in caches too, so that no honest
call is faster. Operations are no part of the floor: algebra may save them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusewright.judge.wire import Node, named_leaves
from fusewright.verify.scenarios import Results

_COPY_BYTES = {
    "cpu": (1 << 18, 1 << 20, 1 << 24, 1 << 26),
    "cuda": (1 << 22, 1 << 24, 1 << 26, 1 << 30),
}
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS, _ENOUGH_S = 12, 2e-3


@dataclass(frozen=True)
class Rates:
    """Bytes read and written in a second by the fastest copy, and operations of a matmul."""

    copy_bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class LeastBytes:
    """What a call must move: once for each set of inputs, and the weights once for all sets."""

    of_a_set: int
    of_weights: int

    def floor_us(self, sets: int, rates: Rates) -> float:
        """Microseconds of one call of a request with so many sets."""
        return (self.of_a_set + self.of_weights / sets) / rates.copy_bytes_per_s * 1e6


def measure_rates(device: torch.device) -> Rates:
    """The rates of this process's CPU or GPU."""
    copying = max(2 * size / _copy_s(size, device) for size in _COPY_BYTES[device.type])
    width = _MATMUL_SIZE[device.type]
    left, right = torch.randn(2, width, width, device=device)
    out = torch.empty_like(left)
    seconds = _best_s(lambda: torch.mm(left, right, out=out), device)
    return Rates(copying, 2 * width**3 / seconds)


def _copy_s(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best_s(lambda: target.copy_(source), device)


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    """The fastest of several calls; short ones are timed many at once."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    count = max(int(_ENOUGH_S / max(time.perf_counter() - start, 1e-7)), 1)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        times.append((time.perf_counter() - start) / count)
    return min(times)


def least_bytes(
    eager: Results, outputs: Node, tangents: Mapping[str, Tensor], weights: frozenset[str]
) -> LeastBytes:
    """The least that a call moves, from eager's results with gradients.

    `outputs` has the strides of the outputs: an expanded one is written once. `tangents` are the
    incoming gradients, for a training step only.
    """
    of_a_set = of_weights = 0
    for name, each in eager.items():
        if not name.startswith("grad ") or not isinstance(each, Tensor):
            continue
        size = int(torch.count_nonzero(each)) * each.dtype.itemsize
        if name.removeprefix("grad ") in weights:
            of_weights += size
        else:
            of_a_set += size
    strides = {name: node.get("stride", ()) for name, node in named_leaves("output", outputs)}
    for name, each in eager.items():
        if name in strides and isinstance(each, Tensor) and not _is_expanded(each, strides[name]):
            of_a_set += each.nbytes
    of_a_set += sum(each.nbytes for each in tangents.values())
    return LeastBytes(of_a_set, of_weights)


def _is_expanded(tensor: Tensor, strides: list[int]) -> bool:
    return any(size > 1 and not step for size, step in zip(tensor.shape, strides, strict=True))
