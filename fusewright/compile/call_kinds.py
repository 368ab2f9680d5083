"""What a guard checks of a call: for the guard itself, and as text, to know a call again."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusewright.compile.original import original_class
from fusewright.emit.bundle import Arguments
from fusewright.runtime import altered, guard

DEVICES = ("cpu", "cuda")


def arguments_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Arguments:
    """The example call, for its guard."""
    names = positional_parameters(original_class(model).forward)
    args, rest = guard._fw_positional(names, tuple(args), dict(kwargs or {}))
    structure = guard._fw_flatten((args, rest), [])
    plain = not rest and all(isinstance(each, torch.Tensor) for each in args)
    return Arguments(structure, len(args) if plain else -1, names)


@functools.cache
def positional_parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters of a class's forward, after self."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in kinds)


def sketch_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What a guard checks of a call, without modes, sizes, strides and numbers."""
    leaves: list[Any] = []
    structure = guard._fw_flatten((tuple(args), dict(kwargs)), leaves)
    structure = re.sub(r"(?<![\w.])-?\d[\d.]*(e[+-]?\d+)?", "0", structure)
    leaves += [*module.parameters(), *module.buffers()]
    facts = [f"{t.dtype}{t.device}{t.dim()}{t.layout}" for t in leaves]
    state = (torch.get_default_dtype(), [guard._fw_autocast(each) for each in DEVICES])
    tree = [altered._fw_kind(each) for each in module.modules()]
    return f"{structure}{facts}{state}{tree}"


def kind_of_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Sequence[str]
) -> str:
    """All facts that a guard checks, as text. A refused kind is not tried again."""
    leaves: list[Any] = []
    held = [guard._fw_attribute(module, tuple(path.split("."))) for path in changed]
    structure = guard._fw_flatten((args, kwargs, held), leaves)
    leaves += [*module.parameters(), *module.buffers()]
    facts = [
        f"{t.dtype}{t.device}{tuple(t.shape)}{t.stride()}{t.requires_grad}"
        if t.layout is torch.strided
        else f"{t.layout}"
        for t in leaves
    ]
    state = (module.training, torch.is_grad_enabled(), [guard._fw_autocast(d) for d in DEVICES])
    tree = [(each.training, altered._fw_kind(each)) for each in module.modules()]
    return f"{structure}{facts}{state}{torch.get_default_dtype()}{tree}"
