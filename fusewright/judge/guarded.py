"""Tensors between two guard zones: what a kernel reads or writes beside them shows.

The zones hold the byte 0xff, which is NaN in every floating type and -1 in every integer type. A
kernel that reads them computes NaN, and a kernel that writes to them changes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

ZONE_BYTES = 4096
_ALIGNMENT = 64  # as PyTorch's own allocator
_GUARD = 0xFF
_M_PERTURB, _PERTURBATION = -6, 0x01


def fill_new_memory() -> None:
    """Let glibc overwrite all memory that it gives out or takes back, as long as this runs.

    What a kernel forgets to write is then -1.7e38 and not the result of an earlier call.
    """
    found = getattr(ctypes.CDLL(None), "mallopt", None)
    if found is not None:
        found(_M_PERTURB, _PERTURBATION)


class Guarded:
    """Memory for one tensor; every `view` is another tensor object at the same address."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> None:
        self.form = (dtype, tuple(shape), tuple(stride))
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        self._size = 0 if 0 in shape else span * dtype.itemsize
        room = self._size + 2 * ZONE_BYTES + _ALIGNMENT
        self._bytes = torch.full((room,), _GUARD, dtype=torch.uint8)
        self._start = ZONE_BYTES + -(self._bytes.data_ptr() + ZONE_BYTES) % _ALIGNMENT

    def view(self) -> Tensor:
        """A new tensor over this memory. Its version counter starts afresh."""
        dtype, shape, stride = self.form
        storage = self._bytes.untyped_storage()
        offset = self._start // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)

    def write(self, values: Tensor) -> None:
        """New values, as if another program wrote them: no version counter shows it."""
        mine = self.view()
        for dim, (size, stride) in enumerate(zip(mine.shape, mine.stride(), strict=True)):
            if size > 1 and stride == 0:  # an expanded dimension has one element
                mine, values = mine.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        mine.copy_(values)

    @property
    def is_intact(self) -> bool:
        """Whether nobody wrote to the zones."""
        ends = self._start + self._size
        both = (self._bytes[: self._start], self._bytes[ends:])
        return all(bool((zone == _GUARD).all()) for zone in both)
