"""Runs a float32 model in float64: converts its arguments and the types that its code names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def widened(leaf: object) -> object:
    """A floating or complex tensor in double precision."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_complex():
        return leaf.to(torch.complex128)
    return leaf.double() if leaf.is_floating_point() else leaf


@contextmanager
def doubled() -> Iterator[None]:
    """Run a model in float64 even if its code names narrower types."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubling():
            yield
    finally:
        torch.set_default_dtype(default)


class _Doubling(TorchFunctionMode):
    """Reads every float16, bfloat16 and float32 in a call as float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        named = {key: _wide_dtype(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide_dtype, args), **named)


def _wide_dtype(value: object) -> object:
    narrow = (torch.float16, torch.bfloat16, torch.float32)
    return torch.float64 if isinstance(value, torch.dtype) and value in narrow else value
