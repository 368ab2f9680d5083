"""Tensors of other layouts than strided, such as sparse ones. The original forward is for them:
kernels do not read them, and PyTorch's traces of some abort the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusewright.capture.attributes import own_attributes, tensors_in
from fusewright.runtime import guard


def other_layout(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The first such tensor of a call, in words."""
    for name, tensor in _named(module, args, kwargs):
        if tensor.layout is not torch.strided:
            return f"{name} is {tensor.layout} instead of {torch.strided}"
    return None


def _named(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    leaves: list[torch.Tensor] = []
    guard._fw_flatten((tuple(args), dict(kwargs)), leaves)
    yield from ((f"argument {at}", each) for at, each in enumerate(leaves))
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, each in module.named_modules():
        for name, value in own_attributes(each).items():
            yield from ((".".join(filter(None, (path, name))), t) for _, t in tensors_in(value))
