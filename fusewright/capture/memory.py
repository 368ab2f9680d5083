"""Whether there is memory for a real call of a model beside the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

# Copies of all tensors, their gradients, and as much again for what forward saves.
_TIMES = 3
_HOST = Path("/proc/meminfo")


def has_room(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a call with copies of these tensors fits, on each device that they are on.

    What forward saves is not known before it runs, so this is a guess: a GPU says itself when its
    memory is full, but a host may end the process.
    """
    needed: Counter[torch.device] = Counter()
    for each in tensors:
        needed[each.device] += _TIMES * each.numel() * each.element_size()
    return all(bytes_ <= free_bytes(device) for device, bytes_ in needed.items())


def free_bytes(device: torch.device) -> int:
    """The memory that a device has left; that of a host if the system tells."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if not _HOST.exists():
        return 2**62
    lines = (line.split() for line in _HOST.read_text().splitlines())
    return next((1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:"), 2**62)
