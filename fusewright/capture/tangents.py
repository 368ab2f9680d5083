"""The layout that a trace gives to the gradients of outputs: that of the outputs.

Eager mode takes gradients as they come, and mostly they lie as the outputs do. PyTorch's trace does
the same if sizes are fixed. With symbolic sizes it assumes contiguous gradients, because its own
wrappers cannot compute strides. Ours can. The layout of the input's gradient follows from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._prims_common import suggest_memory_format


@contextlib.contextmanager
def laid_out_as_outputs() -> Iterator[None]:
    """Gradients of dense outputs have their strides in traces while the block runs."""
    plain = MemoryFormatMeta.from_tensor

    def as_output(tensor: torch.Tensor, *rest: Any, **more: Any) -> MemoryFormatMeta | None:
        shape, strides = _examples(tensor.shape), _examples(tensor.stride())
        if shape is None or strides is None:
            return plain(tensor, *rest, **more)
        if _may_overlap(shape, strides):
            # In such memory, one element of the gradient would overwrite another.
            return MemoryFormatMeta(memory_format=suggest_memory_format(tensor))
        if not _is_dense(shape, strides):
            return plain(tensor, *rest, **more)
        return MemoryFormatMeta(size=tensor.size(), stride=tensor.stride())

    with patch.object(MemoryFormatMeta, "from_tensor", staticmethod(as_output)):
        yield


def _examples(sizes: Sequence[Any]) -> list[int] | None:
    """The sizes of the example; None if one depends on data."""
    known = [each if isinstance(each, int) else each.node.hint for each in sizes]
    return None if None in known else known


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor has each element of its memory once."""
    expected = 1
    for stride, size in sorted((b, a) for a, b in zip(shape, strides, strict=True) if a != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may be one in memory, as in the windows of `unfold`."""
    extent = 0
    for stride, size in sorted((b, a) for a, b in zip(shape, strides, strict=True) if a > 1):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False
