"""Memory that the judge owns and a candidate's process maps: inputs before a call, results after.

The judge writes inputs and incoming gradients while the process is stopped, and looks at their
guard zones itself. A process copies its results to the second part, block after block in a random
order, so that a thread that still computes them cannot keep ahead of the copy.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import random
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
_BLOCKS, _LEAST_BLOCK_BYTES = 16, 1 << 16
_ADD_SEALS, _NO_SHRINKING, _NO_GROWING = 1033, 0x2, 0x4


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """One mapping of the memory; `inputs_bytes` at its start are for inputs."""

    def __init__(self, descriptor: int, inputs_bytes: int) -> None:
        self.descriptor, self.inputs_bytes = descriptor, inputs_bytes
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self._chance = random.SystemRandom()

    @classmethod
    def new(cls, inputs_bytes: int, results_bytes: int) -> Arena:
        """Memory that takes room only where it is used, and whose size nobody can change."""
        descriptor = os.memfd_create("results", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        whole = [
            -(-each // mmap.PAGESIZE) * mmap.PAGESIZE for each in (inputs_bytes, results_bytes)
        ]
        os.ftruncate(descriptor, sum(whole))
        fcntl.fcntl(descriptor, _ADD_SEALS, _NO_SHRINKING | _NO_GROWING)
        return cls(descriptor, whole[0])

    def close(self) -> None:
        os.close(self.descriptor)

    def bytes_at(self, offset: int, count: int) -> Tensor:
        """A tensor of bytes in a storage of its own."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=offset)

    def has_room(self, sizes: Sequence[int]) -> bool:
        return self.inputs_bytes + sum(map(aligned, sizes)) <= self.size

    def put(self, tensor: Tensor, start: int) -> int:
        """Copy a dense tensor to the results, `start` bytes after their beginning.

        Returns its size, or -1 if there is no room for it.
        """
        size = tensor.nbytes
        begin = self.inputs_bytes + start
        if begin + size > self.size:
            return -1
        if size:
            kind = tensor.dtype
            count = size // kind.itemsize
            target = torch.frombuffer(self._map, dtype=kind, count=count, offset=begin)
            source = tensor.view(-1)
            for block in self._blocks(count, kind.itemsize):
                target[block].copy_(source[block])
        return size

    def _blocks(self, count: int, itemsize: int) -> list[slice]:
        least = _LEAST_BLOCK_BYTES // itemsize
        each = max(math.ceil(count / _BLOCKS), least)
        blocks = [slice(start, min(start + each, count)) for start in range(0, count, each)]
        if len(blocks) > 1:
            self._chance.shuffle(blocks)
        return blocks

    def taken(self, sizes: Sequence[int]) -> list[bytes]:
        """The results that lie there one after the other, as bytes of our own.

        They are copied block after block in a random order, the last ones not always last.
        """
        starts, blocks = [self.inputs_bytes], []
        found = [bytearray(size) for size in sizes]
        for number, size in enumerate(sizes):
            starts.append(starts[-1] + aligned(size))
            blocks += [(number, each) for each in self._blocks(size, 1)]
        self._chance.shuffle(blocks)
        whole = memoryview(self._map)
        for number, block in blocks:
            start = starts[number]
            found[number][block] = whole[start + block.start : start + block.stop]
        return [bytes(each) for each in found]
