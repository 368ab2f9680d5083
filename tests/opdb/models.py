"""Models of one operator or module with pointwise chains around it, so that there is fusion.

The chain in front gives its argument back, exactly: an operator with steps, such as `floor`, sees
the same numbers in every precision. The results are returned as they are and with a chain behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def before(x: Tensor) -> Tensor:
    """The same numbers, as a new tensor."""
    if x.layout is not torch.strided or x.is_complex():
        return x
    if x.dtype == torch.bool:
        return torch.logical_not(torch.logical_not(x))
    if x.is_floating_point():
        return x * 0.5 + x * 0.5
    return (x + 3) - 3


def behind(y: Any) -> Any:
    """The result, and something computed from it."""
    if not isinstance(y, Tensor) or y.layout is not torch.strided or y.is_complex():
        return y
    if y.dtype == torch.bool:
        return y, torch.logical_not(y)
    # Without cancellation, which would show the rounding of a 16-bit result.
    return (y, y * 0.75 * 0.5) if y.is_floating_point() else (y, y + 1)


class Called(nn.Module):
    """A function's call. The tensors among its arguments are the inputs; others are constants."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.function = function
        self.places = [at for at, each in enumerate(leaves) if isinstance(each, Tensor)]
        self.constants = [None if isinstance(each, Tensor) else each for each in leaves]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.constants)
        for at, each in zip(self.places, tensors, strict=True):
            leaves[at] = before(each)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return pytree.tree_map(behind, self.function(*args, **kwargs))


class Layer(nn.Module):
    """A module's call, in the same way."""

    def __init__(self, layer: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        super().__init__()
        self.layer = layer
        self.call = Called(layer.forward, args, kwargs)
        del self.call.function

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.call.constants)
        for at, each in zip(self.call.places, tensors, strict=True):
            leaves[at] = before(each)
        args, kwargs = pytree.tree_unflatten(leaves, self.call.spec)
        return pytree.tree_map(behind, self.layer(*args, **kwargs))


def tensors_of(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]
