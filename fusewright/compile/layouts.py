"""Tensors of other layouts than strided, such as sparse ones. The original forward is for them:
kernels do not read them, and PyTorch's traces of some abort the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusewright.capture.attributes import own_attributes, tensors_in
from fusewright.problem.nested import leaves


def other_layout(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The first such tensor of a call or of its module, in words."""
    return other_argument(args, kwargs) or _told(_held(module))


def other_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The first such argument."""
    given = (each for _, each in leaves("", (tuple(args), dict(kwargs))))
    tensors = (each for each in given if isinstance(each, torch.Tensor))
    return _told((f"argument {at}", each) for at, each in enumerate(tensors))


def _told(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    odd = ((name, each.layout) for name, each in named if each.layout is not torch.strided)
    return next((f"{name} is {layout} instead of {torch.strided}" for name, layout in odd), None)


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, each in module.named_modules():
        for name, value in own_attributes(each).items():
            yield from ((".".join(filter(None, (path, name))), t) for _, t in tensors_in(value))
