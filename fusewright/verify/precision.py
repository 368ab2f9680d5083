"""Matmuls of fewer digits, and matmuls without TF32: they set the limits of each class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Significant binary digits, the leading one included.
DIGITS = {"tf32": 11, "bf16": 8}
_MATMULS = frozenset("mm addmm bmm baddbmm mv addmv dot convolution convolution_backward".split())


class RoundOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the float64 operands of every matmul to a number of binary digits."""

    def __init__(self, digits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digits = digits

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
        if name in _MATMULS:
            args = tuple(rounded(each, self.digits) for each in args)
        return func(*args, **(kwargs or {}))


def rounded(value: Any, digits: int) -> Any:
    """A float64 tensor, rounded to `digits` (Veltkamp's split); anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        return value
    spread = value * float(2 ** (53 - digits) + 1)
    return torch.where(spread.isfinite(), spread - (spread - value), value)


def may_use_tf32() -> bool:
    """Whether PyTorch may round the operands of matmuls or convolutions."""
    allowed = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return torch.cuda.is_available() and bool(allowed)


@contextmanager
def strict_matmuls() -> Iterator[bool]:
    """No TF32 in matmuls and convolutions; yields whether the flags allow it outside."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (bool(matmul.allow_tf32), bool(cudnn.allow_tf32))
    matmul.allow_tf32, cudnn.allow_tf32 = False, False
    try:
        yield torch.cuda.is_available() and any(before)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
