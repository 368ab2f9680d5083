"""Whether one trace of a model can stand for later calls, and where guards must look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fusewright.capture import in_mode
from fusewright.capture.hooks import unhooked
from fusewright.capture.private import private
from fusewright.capture.reachable import Reachable
from fusewright.capture.reads import is_library
from fusewright.capture.unguarded import Trust, trust, worst
from fusewright.compile.pipeline import MODES
from fusewright.compile.places import identity
from fusewright.errors import LeftToEagerError, UnguardedError


def require_no_effects_outside(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    modes: Sequence[str],
) -> None:
    """An UnguardedError if a real call or a trace might change what copies of the model share, and
    Dynamo, which runs nothing, says that a trace could not stand for later calls anyway."""
    require_python(model)
    if _has_own_call(type(model)):
        # What forward is given then, no example tells.
        trusted = trust_of(model, args, kwargs, MODES)
        raise unguarded(f"{type(model).__name__} has a __call__ of its own", trusted)
    reachable = Reachable(model)
    found = [trust_of(model, args, kwargs, [each], True) for each in modes if reachable.shares()]
    if found and all(each.reason for each in found):
        raise unguarded(worst(found).reason, worst_of(found))
    if reachable.assigned():
        trusted = trust_of(model, args, kwargs, MODES)
        raise unguarded(f"forward assigns {reachable.assigned()}", trusted)


def require_python(model: nn.Module) -> None:
    """A LeftToEagerError if a module keeps its state out of sight of Python."""
    for name, each in model.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            how = "use the Python module, or optimize other parts with optimize_parts"
            raise LeftToEagerError(
                f"{name or type(model).__name__} is a TorchScript module, which no guard of ours "
                f"can compare; {how}"
            )


def _has_own_call(kind: type[nn.Module]) -> bool:
    """Whether a class changes what a call is. It does so around our forward, too."""
    owner = next(each for each in kind.__mro__ if "__call__" in vars(each))
    return not is_library(owner) and not issubclass(kind, fx.GraphModule)


def trust_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    modes: Sequence[str],
    witnessed: bool = False,
) -> Trust:
    """Whether a trace of this call can stand for later ones, in all of these modes. `witnessed`: no
    numbers of the process's own random generators were drawn."""
    traced, given, named = private(model, args, kwargs)
    found = []
    for mode in modes:
        with in_mode(traced, mode), unhooked(traced):
            found.append(trust(traced, given, named, witnessed=witnessed))
    return worst_of(found)


def worst_of(found: Sequence[Trust]) -> Trust:
    """The reason that asks for most, with all places."""
    rows = [row for each in found for row in each.watched]
    watched = {(identity(place), name): (place, name, value) for place, name, value in rows}
    codes = frozenset().union(*(each.codes for each in found))
    return replace(worst(found), watched=tuple(watched.values()), codes=codes)


def unguarded(reason: str, found: Trust) -> UnguardedError:
    return UnguardedError(
        reason,
        by_dynamo=found.by_dynamo,
        watched=found.watched,
        beside=found.beside,
        codes=found.codes,
    )
