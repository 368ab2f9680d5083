"""Less work for each new result of an operator on fake tensors.

PyTorch keeps the shapes that operators return. Before it keeps a result, it builds the tensor a
second time from what it would keep, and compares the dispatch keys of both. With symbolic sizes
this takes as long as the operator itself. The keys follow from the kind of tensor, so we let
PyTorch compare them once for each kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_NAME, _BUILD = "_get_output_info_for_cache_entry", "_output_from_cache_entry"


@contextlib.contextmanager
def compared_once(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Results in `fake_mode` are built a second time once for each kind while the block runs."""
    plain = getattr(FakeTensorMode, _NAME)
    known: dict[tuple[Any, ...], str] = {}

    def kept(self: FakeTensorMode, *given: Any) -> Any:
        func, output = given[2], given[-1]
        if self is not fake_mode or type(output) is not FakeTensor or not _has_sizes(output):
            return plain(self, *given)
        kind, keys = _kind(func, output), str(torch._C._dispatch_key_set(output))
        if known.get(kind) != keys:
            entry = plain(self, *given)  # raises, if the keys are different
            known[kind] = keys
            return entry
        setattr(self, _BUILD, lambda *_: output)
        try:
            return plain(self, *given)
        finally:
            delattr(self, _BUILD)

    with patch.object(FakeTensorMode, _NAME, kept):
        yield


def _kind(func: Any, output: torch.Tensor) -> tuple[Any, ...]:
    """What the dispatch keys of a rebuilt result depend on."""
    bits = output.requires_grad, output.is_conj(), output.is_neg(), output.is_inference()
    return output.device, output.dtype, output.layout, getattr(func, "is_view", None), *bits


def _has_sizes(output: torch.Tensor) -> bool:
    """Whether each size has an example. A size that depends on data has none."""
    return all(isinstance(each, int) or each.node.hint is not None for each in output.shape)
