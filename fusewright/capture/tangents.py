"""The layout that a trace gives to the gradients of outputs: that of the outputs.

Eager mode takes gradients as they come, and mostly they lie as the outputs do. PyTorch's trace does
the same if sizes are fixed. With symbolic sizes it assumes contiguous gradients, because its own
wrappers cannot compute strides. Ours can. The layout of the input's gradient follows from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._prims_common import suggest_memory_format


def laid_out_as_outputs() -> AbstractContextManager[None]:
    """Gradients of dense outputs have their strides in traces while the block runs; those of
    overlapping ones lie apart."""
    return _by_rule(lambda tensor, *known: _apart(tensor, *known) or _as_output(tensor, *known))


def laid_out_apart() -> AbstractContextManager[None]:
    """Gradients of overlapping outputs lie apart in traces while the block runs.

    In the memory of such an output, one element of the gradient would overwrite another. PyTorch's
    own traces notice only strides of zero.
    """
    return _by_rule(_apart)


@contextlib.contextmanager
def _by_rule(rule: Callable[..., MemoryFormatMeta | None]) -> Iterator[None]:
    """Ask the rule first; PyTorch's own counts where it gives None."""
    plain = MemoryFormatMeta.from_tensor

    def layout(tensor: torch.Tensor, *rest: Any, **more: Any) -> MemoryFormatMeta | None:
        shape, strides = _examples(tensor.shape), _examples(tensor.stride())
        known = shape is not None and strides is not None
        found = rule(tensor, shape, strides) if known else None
        return plain(tensor, *rest, **more) if found is None else found

    with patch.object(MemoryFormatMeta, "from_tensor", staticmethod(layout)):
        yield


def _apart(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
) -> MemoryFormatMeta | None:
    if not _may_overlap(shape, strides):
        return None
    return MemoryFormatMeta(memory_format=suggest_memory_format(tensor))


def _as_output(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
) -> MemoryFormatMeta | None:
    if not _is_dense(shape, strides):
        return None
    return MemoryFormatMeta(size=tensor.size(), stride=tensor.stride())


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
