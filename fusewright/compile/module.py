"""The optimized module: the model's own class, state and hooks, with our forward."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from fusewright.compile.engine import ENGINE, Engine, Front, Specialise
from fusewright.compile.offered import Offers
from fusewright.compile.original import original_class
from fusewright.compile.owners import Modes
from fusewright.compile.places import Places
from fusewright.runtime import call


def optimized(
    model: nn.Module,
    modes: Modes = (),
    specialise: Specialise | None = None,
    left_out: frozenset[str] = frozenset(),
    front: Front | None = None,
    reason: str = "",
    sketches: frozenset[str] = frozenset(),
    eager: frozenset[str] = frozenset(),
    places: Places | None = None,
) -> nn.Module:
    """A module that shares all state with the model; its class is a subclass of the model's."""
    made = _fresh(original_class(model))
    made.__dict__.update(model.__dict__)
    made.__dict__.pop("_fw_seen", None)
    settings = (left_out, front, reason, sketches, eager, places)
    made.__dict__[ENGINE] = Engine(specialise, modes, *settings)
    return made


class Optimized(Offers):
    """The first base of every optimized class; the model's own class is the second."""

    _fw_original: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.__dict__[ENGINE]
        if engine.reason:
            return engine.by_dynamo(self, args, kwargs)
        reason, result = call._fw_forward(engine.modes, self, args, kwargs)
        return result if reason is None else engine.answer(self, args, kwargs, reason)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        # A pickle cannot find a class made here by name, so it names the model's class.
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_fresh, (self._fw_original,), *reduced[2:])
        return reduced


def _with_signature(function: Any, of: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own with the same code, that shows the signature of another one."""
    twin = types.FunctionType(function.__code__, function.__globals__)
    return functools.update_wrapper(twin, of)


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _fresh(kind: type[nn.Module]) -> nn.Module:
    """An empty object of the optimized class for `kind`."""
    if kind not in _SUBCLASSES:
        names: dict[str, Any] = {"_fw_original": kind, "__doc__": kind.__doc__}
        names |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        names["forward"] = _with_signature(Optimized.forward, kind.forward)
        _SUBCLASSES[kind] = type(kind.__name__, (Optimized, kind), names)
    made: nn.Module = object.__new__(_SUBCLASSES[kind])
    return made
