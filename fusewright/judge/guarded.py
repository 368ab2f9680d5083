"""Tensors between two guard zones: what a kernel reads or writes beside them shows.

The zones hold the byte 0xff, which is NaN in every floating type and -1 in every integer type. A
kernel that reads them computes NaN, and a kernel that writes to them changes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from fusewright.judge.arena import ALIGNMENT

ZONE_BYTES = 4096
GUARD = 0xFF
_M_PERTURB, _PERTURBATION = -6, 0x01


def memory_filler() -> Callable[[bool], None]:
    """A function that lets glibc overwrite all memory that it gives out or takes back, or not.

    What a kernel forgets to write is then -1.7e38 and not the result of an earlier call.
    """
    found = getattr(ctypes.CDLL(None), "mallopt", None)

    def fill(wanted: bool) -> None:
        if found is not None:
            found(_M_PERTURB, _PERTURBATION if wanted else 0)

    return fill


# The data type, the shape and the strides of a tensor.
Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


def span_bytes(form: Form) -> int:
    """From the first byte of a tensor to its last one."""
    dtype, shape, stride = form
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return 0 if 0 in shape else span * dtype.itemsize


def room(form: Form) -> int:
    """The bytes of a tensor with its zones."""
    return span_bytes(form) + 2 * ZONE_BYTES + ALIGNMENT


class Guarded:
    """Memory for one tensor; every `view` is another tensor object at the same address.

    `memory` has `room` bytes, from which the address follows; without it, new memory is taken. The
    tensor begins `shift` bytes, at most a few, after an aligned address.
    """

    def __init__(self, form: Form, memory: Tensor | None = None, shift: int = 0) -> None:
        self.form = form
        self._size = span_bytes(form)
        if memory is None:
            memory = torch.full((room(form),), GUARD, dtype=torch.uint8)
        self._bytes = memory
        self._start = ZONE_BYTES + -(memory.data_ptr() + ZONE_BYTES) % ALIGNMENT + shift

    @property
    def memory(self) -> Tensor:
        """All bytes, with both zones."""
        return self._bytes

    def fill(self, values: Tensor) -> None:
        """Guard zones, and values between them."""
        self._bytes.fill_(GUARD)
        self.write(values)

    def view(self) -> Tensor:
        """A new tensor over this memory. Its version counter starts afresh."""
        dtype, shape, stride = self.form
        storage = self._bytes.untyped_storage()
        offset = self._start // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=self._bytes.device)
        return empty.set_(storage, offset, shape, stride)

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
        return all(bool((zone == GUARD).all()) for zone in both)
