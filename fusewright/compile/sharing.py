"""Which arguments of a call lie in the same memory.

A write into one of them changes the others. PyTorch's trace follows that for the arguments that it
is given, and does not guard it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# For each tensor the first one in the same memory; empty if each has its own.
Sharing = tuple[int, ...]


def sharing(given: Iterable[object]) -> Sharing:
    """How these values of the arguments share memory. A tensor that is given twice counts once:
    that is guarded."""
    found = {id(each): each for each in given if isinstance(each, torch.Tensor)}
    if len(found) < 2:
        return ()
    starts = [_start(each) for each in found.values()]
    return () if len(set(starts)) == len(starts) else tuple(map(starts.index, starts))


def _start(tensor: torch.Tensor) -> object:
    """Where the memory of a tensor begins, or the tensor itself if that cannot be told."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # it has no memory of its own
        return id(tensor)
