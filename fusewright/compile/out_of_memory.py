"""Want of memory: every allocator and library says it in other words."""

from __future__ import annotations

import torch

# What allocators and libraries say without an error class of their own.
_NO_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was the cause, of an error or of one that it was made from."""
    while error is not None:
        words = str(error) if isinstance(error, RuntimeError) else ""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if any(each in words for each in _NO_MEMORY):
            return True
        error = error.__cause__
    return False
