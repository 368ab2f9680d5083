"""The memory and the time that checks may take, and what a call needs of them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.problem.inputs import Block, is_differentiable, named_tensors
from fusewright.verify.scenarios import Scenario

# The rest is for libraries, for fragments, and on a host for other programs.
_DEVICE_SHARE, _HOST_SHARE = 0.9, 0.6
_LEAST_ROOM = 0.125
_MEMORY_INFO = Path("/proc/meminfo")
# The largest block of the host's memory that is filled with NaN.
_FILLED = 1 << 26


@dataclass(frozen=True)
class Budget:
    """The most that checks may take; without figures, there is no limit."""

    memory_bytes: float = math.inf
    seconds: float = math.inf


@dataclass(frozen=True)
class Deadline:
    """The end of a budget, by the monotonic clock."""

    ends: float

    @property
    def left_s(self) -> float:
        return max(self.ends - time.monotonic(), 0.0)


def deadline(budget: Budget) -> Deadline:
    return Deadline(time.monotonic() + budget.seconds)


def budget_of(device: torch.device, seconds: float = math.inf) -> Budget:
    """Most of the memory that is free on the device, and this time."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Budget((free + kept) * _DEVICE_SHARE, seconds)
    return Budget(_host_bytes() * _HOST_SHARE, seconds)


def _host_bytes() -> float:
    """The memory that a program can have without swapping; unknown off Linux."""
    if not _MEMORY_INFO.exists():
        return math.inf
    lines = (line.split() for line in _MEMORY_INFO.read_text().splitlines())
    found = {words[0]: float(words[1]) * 1024 for words in lines if len(words) > 1}
    return found.get("MemAvailable:", math.inf)


def affordable_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks of memory to fill with NaN; on the host, one element for each that is large.

    A GPU that has no memory left for them says so. A host may end the program, and its allocator
    overwrites new memory anyway.
    """
    return tuple(
        (device, dtype, 1 if device.type == "cpu" and count * dtype.itemsize > _FILLED else count)
        for device, dtype, count in blocks
    )


def no_memory_words() -> str:
    """What to say if memory ran out: who holds it, and what to do."""
    how = "make the inputs smaller, or run where there is more"
    if not torch.cuda.is_available():
        return f"memory ran out: {how}"
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    gigabytes = [f"{each / 1e9:.1f} GB" for each in (total, held, max(total - free - held, 0))]
    shared = "of the GPU's {} this process holds {} and other programs hold {}".format(*gigabytes)
    return f"memory ran out ({shared}): {how}"


def free_memory(device: torch.device) -> None:
    """Give back what failed or finished runs held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Footprint:
    """The bytes of one call: inputs, outputs, parameters, and what forward keeps for backward.

    `targets` are the inputs that take gradients, `largest` is the largest of all tensors.
    """

    inputs: float
    targets: float
    outputs: float
    parameters: float
    saved: float
    largest: float

    def float64_bytes(self, scenario: Scenario) -> float:
        """What a check with a float64 run holds at its worst moment."""
        inputs, outputs, parameters = self.inputs, self.outputs, self.parameters
        # Two sets of inputs, the incoming gradient, eager's outputs, the two models.
        usual = 2 * inputs + 2 * outputs + 2 * parameters
        if not scenario.gradients:
            return usual + 2 * (2 * inputs + parameters + 2 * outputs + 2 * self.largest)
        gradients = self.targets + parameters
        usual += len(scenario.layouts) * gradients
        wide = 2 * inputs + 2 * outputs + parameters + self.saved + 2 * gradients
        return usual + 2 * (wide + 2 * self.largest)

    def part(self, share: float) -> Footprint:
        """The same with this share of the rows."""
        sizes = (self.inputs, self.targets, self.outputs)
        inputs, targets, outputs = (share * each for each in sizes)
        largest = max(share * self.largest, self.parameters)
        return Footprint(inputs, targets, outputs, self.parameters, share * self.saved, largest)


def room_for_rows(memory: float, fixed: float) -> float:
    """The memory for what depends on the rows; some, even if parameters alone take too much."""
    return max(memory - fixed, memory * _LEAST_ROOM)


class SavedTensors:
    """Counts the memory that forward keeps for backward."""

    def __init__(self) -> None:
        # The storages are held, so that no address is used twice.
        self._held: dict[int, Any] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._held[storage.data_ptr()] = storage
        return tensor

    def sizes(self, apart_from: Iterable[Tensor]) -> list[int]:
        """The bytes of each storage, without those of these tensors."""
        known = {each.untyped_storage().data_ptr() for each in apart_from}
        return [each.nbytes() for key, each in self._held.items() if key not in known]


@contextmanager
def counting_saved_tensors() -> Iterator[SavedTensors]:
    counter = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor):
        yield counter


def footprint(
    model: nn.Module,
    inputs: tuple[object, ...],
    outputs: dict[str, Tensor],
    saved: list[int],
) -> Footprint:
    given = [each for _, each in named_tensors(inputs)]
    parameters = [each.nbytes for each in model.parameters()]
    results = [each.nbytes for each in outputs.values()]
    sizes = [each.nbytes for each in given]
    return Footprint(
        inputs=sum(sizes),
        targets=sum(each.nbytes for each in given if is_differentiable(each)),
        outputs=sum(results),
        parameters=sum(parameters),
        saved=sum(saved),
        largest=max((*sizes, *parameters, *results, *saved), default=0),
    )
