"""Calls that are for the original forward, whatever they compute.

Kernels do not read tensors of other layouts than strided, such as sparse ones, and PyTorch's traces
of some abort the process. Distributed tensors and DistributedDataParallel exchange numbers with
other processes, which a trace of ours would leave out.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fusewright.capture.attributes import own_attributes, tensors_in
from fusewright.problem.nested import values

# Its Dynamo does not guard defaults and enclosed variables of functions among the arguments.
_OLD = torch.__version__ < "2.12"


def left_to_original(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """The first reason in a call or in its module, in words."""
    told = left_by_argument(values((*args, *kwargs.values())))
    return told or _told(_held(module)) or _parallel(module)


def left_by_argument(given: Sequence[object]) -> str | None:
    """The first reason among these values, all that the arguments hold."""
    if _OLD and any(map(_has_values, given)):
        return (
            "an argument is a function with defaults or enclosed variables, whose changes "
            "PyTorch before 2.12 does not notice"
        )
    kinds = (torch.Tensor, fx.Proxy)
    tensors = (each for each in given if isinstance(each, kinds))
    return _told((f"argument {at}", each) for at, each in enumerate(tensors))


def _has_values(argument: Any) -> bool:
    """Whether it is a function with defaults or enclosed variables."""
    if not isinstance(argument, types.FunctionType):
        return False
    return bool(argument.__defaults__ or argument.__kwdefaults__ or argument.__closure__)


def _told(named: Iterable[tuple[str, Any]]) -> str | None:
    for name, each in named:
        if isinstance(each, fx.Proxy):
            return f"{name} is a torch.fx.Proxy: torch.fx.symbolic_trace is active"
        if each.layout is not torch.strided:
            return f"{name} is {each.layout} instead of {torch.strided}"
        if _is_distributed(each):
            return f"{name} is a DTensor, which is spread over several processes"
    return None


def _is_distributed(tensor: torch.Tensor) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")  # to import it takes 0.3 s
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def _parallel(module: nn.Module) -> str | None:
    """A wrapper of PyTorch that gathers parameters or gradients of other processes in forward."""
    kinds: tuple[type, ...] = (nn.parallel.DistributedDataParallel,)
    loaded = sys.modules.get("torch.distributed.fsdp")
    kinds += () if loaded is None else (loaded.FullyShardedDataParallel,)
    for each in module.modules():
        if isinstance(each, kinds):
            name = type(each).__name__
            how = f"optimize the model inside it: {name}(fusewright.optimize(model, inputs))"
            return f"{name} talks to other processes; {how}"
    return None


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, each in module.named_modules():
        for name, value in own_attributes(each).items():
            yield from ((".".join(filter(None, (path, name))), t) for _, t in tensors_in(value))
