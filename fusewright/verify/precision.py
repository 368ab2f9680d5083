"""Matmuls of fewer digits, which set the limits of each class, and results that are rounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Significant binary digits, the leading one included.
DIGITS = {"tf32": 11, "bf16": 8}
_MATMULS = frozenset("mm addmm bmm baddbmm mv addmv dot convolution convolution_backward".split())


def operator_name(func: Any) -> str:
    """What a dispatch mode was given, without overload and namespace, such as `mm`."""
    return str(getattr(func, "overloadpacket", func)).removeprefix("aten.")


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
        if operator_name(func) in _MATMULS:
            args = tuple(rounded(each, self.digits) for each in args)
        return func(*args, **(kwargs or {}))


# They choose, move or draw values, and round none. Some of their results are compared as equal.
_EXACT = re.compile(
    "(abs|amax|amin|arange|bernoulli|cat|ceil|clamp|clone|constant_pad|copy|cummax|cummin|embedding$|"
    "empty|eye|fill|flip|floor|full|gather|index|masked|max|median|min|mode$|native_dropout|neg|new_|"
    "normal|ones|rand|reflection|relu|repeat|replication|roll|round|scalar_tensor|scatter|select|sgn|"
    "sign|slice|sort|stack|take|to_copy|topk|tril|triu|trunc|unfold|uniform|unsafe_view|where|zero)"
)


class LastDigits:
    """Factors that change numbers by at most one unit in their last place, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def factors(self, tensor: Tensor, ulp: float) -> Tensor:
        """One for each element, in float64, so that the change is not rounded away."""
        place = tensor.device
        if place not in self._generators:
            self._generators[place] = torch.Generator(place).manual_seed(self._seed)
        noise = torch.rand(tensor.shape, generator=self._generators[place], device=place)
        return 1.0 + ulp * (2.0 * noise.double() - 1.0)


class RoundResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes each float64 result of an operator by at most one unit in a float's last place.

    A sum whose terms cancel, such as the gradient of a softmax that is one, then shows its size.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._digits = LastDigits(seed)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if not _EXACT.match(operator_name(func).lstrip("_")) and not _is_view(func):
            for each in found if isinstance(found, tuple | list) else (found,):
                self._round(each)
        return found

    def _round(self, value: object) -> None:
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            value.mul_(self._digits.factors(value, torch.finfo(torch.float32).eps))


def _is_view(func: Any) -> bool:
    returned = (each.alias_info for each in func._schema.returns)
    return any(each is not None and not each.is_write for each in returned)


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
