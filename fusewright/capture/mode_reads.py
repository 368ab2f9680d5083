"""Whether a model's forward asks for its mode.

`training` is a plain attribute of each module. While a forward is traced, a property of `nn.Module`
stands before it and records that it was read. A forward that does not read it runs the same
operators in training and in evaluation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_NAME = "training"
# Our own stages read the mode around a forward. A traced graph's module copies it from its root.
_NOT_FORWARD = (__name__.rpartition(".")[0], "torch.fx.graph_module")


@dataclass
class ModeReads:
    """`seen`: the mode was read, or may have been."""

    seen: bool = False


@contextlib.contextmanager
def watched_mode(model: nn.Module) -> Iterator[ModeReads]:
    """Record whether the mode is read while the block runs."""
    reads = ModeReads(not _can_watch(model))
    if reads.seen:
        yield reads
        return

    def read(module: nn.Module) -> bool:
        if not reads.seen:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            reads.seen = not (caller.startswith(_NOT_FORWARD) or _drops_nothing(module, caller))
        try:
            found: bool = vars(module)[_NAME]
        except KeyError:
            raise AttributeError(f"{type(module).__name__} has no attribute {_NAME!r}") from None
        return found

    def write(module: nn.Module, value: bool) -> None:
        vars(module)[_NAME] = value

    def remove(module: nn.Module) -> None:
        vars(module).pop(_NAME, None)

    setattr(nn.Module, _NAME, property(read, write, remove))
    try:
        yield reads
    finally:
        delattr(nn.Module, _NAME)


def _drops_nothing(module: nn.Module, caller: str) -> bool:
    """Whether a dropout of rate zero asks. It returns its input in both modes."""
    return (
        isinstance(module, _DropoutNd)
        and caller == _DropoutNd.__module__
        and type(module).__module__ == caller
        and type(module.p) in (int, float)
        and module.p == 0
    )


def _can_watch(model: nn.Module) -> bool:
    """Whether the mode is nothing but the plain attribute: no module has a `training`, `train` or
    `eval` of its own, and none is compiled."""
    if _NAME in vars(nn.Module):
        return False  # another thread watches
    kinds = {type(module) for module in model.modules()}
    own = {name for kind in kinds for each in _above(kind) for name in vars(each)}
    compiled = any(issubclass(kind, torch.jit.ScriptModule) for kind in kinds)
    return not compiled and own.isdisjoint({_NAME, "train", "eval", "__getattribute__"})


def _above(kind: type) -> Iterator[type]:
    """The classes that a module's class adds to nn.Module."""
    return (each for each in kind.__mro__ if each not in nn.Module.__mro__)
