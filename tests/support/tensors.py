"""Tensors for tests: comparisons with the exact result, and copies with another layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this dtype while the block runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def close(ours: torch.Tensor, exact: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Assert that each element is within this absolute and relative tolerance."""
    torch.testing.assert_close(ours.double(), exact.double(), rtol=tolerance, atol=tolerance)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    room[1:].copy_(tensor.flatten())
    return room[1:].view(tensor.shape)


def error(y: Tensor, exact: Tensor) -> float:
    """The norm of the error relative to that of the exact result."""
    return float((y.double() - exact).norm() / exact.norm())


def assert_same(mine: Any, theirs: Any) -> None:
    """Assert equal structures and close values.

    Tolerances are relative to the largest value of each tensor: terms of a sum may cancel.
    """
    ours, form = tree_flatten(mine)
    wanted, same = tree_flatten(theirs)
    assert form == same
    for one, other in zip(ours, wanted, strict=True):
        atol = 1e-6
        if isinstance(other, torch.Tensor) and other.is_floating_point() and other.numel():
            atol *= max(1.0, other.abs().nan_to_num(posinf=0.0).max().item())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=atol, equal_nan=True)
