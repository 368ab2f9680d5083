"""The engine of an optimized module: its programs, and what runs a call that fits none of them.

For such a call, `specialise` makes a new program, once per kind of call. If it cannot, the original
forward runs, so a call that eager refuses raises PyTorch's own error.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fusewright.capture.dynamo_failures import DynamoError, has_begun, is_nested_trace
from fusewright.capture.eager import fails_in_eager
from fusewright.compile.call_kinds import DEVICES, kind_of_call, positional_parameters, sketch_of
from fusewright.compile.left_to_original import left_by_argument, left_to_original
from fusewright.compile.original import original, original_class
from fusewright.compile.owners import Modes, pin
from fusewright.compile.places import Places
from fusewright.compile.record import Record
from fusewright.compile.replayed import renewed
from fusewright.compile.sharing import Sharing, sharing
from fusewright.compile.unhooked import Unhooked
from fusewright.errors import (
    CaptureError,
    FusewrightError,
    LeftToEagerError,
    UnguardedError,
    first_line,
)
from fusewright.problem.nested import values
from fusewright.runtime import call, guard

# Makes the programs of a call; told which attributes the model is known to change.
Specialise = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Sequence[str]], Modes | None]
# The forward of a module's class, compiled by way of Dynamo, for any sizes or those of the call and
# for arguments that share memory so. Anew if the places hold other things; None if too often.
Front = Callable[[nn.Module, bool, Places, Sharing], Callable[..., Any] | None]

# A module with this many programs gets no more: its calls vary too much.
MOST_PROGRAMS = 64
# An attribute with more values than this is not a constant (a list of losses, for example).
MOST_VALUES = 8
ENGINE = "_fw_engine"
FACTS = "facts"  # a program's attribute: what `explain` says of its graphs
_RESIZED = re.compile(r"argument .* has shape |the arguments are .* instead of ")  # a reason


class Engine:
    """The programs of one optimized module; `specialise` makes new ones.

    A copy shares the programs. A pickle has none, and its first call makes them again. With a
    `reason` why no program can stand for other calls, all calls go to `front`. So do calls in the
    modes `left_out`, which have no program, and calls that differ from one of the `sketches` only
    in sizes and numbers, which Dynamo makes symbolic. In the modes `eager` the original forward
    runs; the user has been told so.
    """

    def __init__(
        self,
        specialise: Specialise | None,
        modes: Modes = (),
        left_out: frozenset[str] = frozenset(),
        front: Front | None = None,
        reason: str = "",
        sketches: frozenset[str] = frozenset(),
        eager: frozenset[str] = frozenset(),
        places: Places | None = None,
    ) -> None:
        self.eager = eager
        self.places = places or Places()
        self.unhooked = Unhooked()
        self.front = front
        self.reason = reason
        self.failed = ""  # why the original forward runs instead of `front`
        self.sketches = set(sketches)
        self.foreign: set[str] = set()  # sketches of calls that no program can stand for
        self.specialise = specialise
        self.modes = list(modes)
        self.left_out = left_out
        self.refused: dict[str, str] = {}  # kinds of calls, and why eager runs them
        self.values: Counter[str] = Counter()
        self.record = Record()
        self.source: Any = None  # what `save` writes

    def answer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> Any:
        """The result of a call that fits no program, for this reason."""
        if call._fw_compiling():
            return self._by_original(module, args, kwargs, reason)
        mode = "train" if module.training else "eval"
        if mode in self.eager or any(each.forward_only == reason for each in self.modes):
            # The user was told of this when the model was optimized.
            return self._by_original(module, args, kwargs, reason)
        if mode in self.left_out:
            return self.by_dynamo(module, args, kwargs)
        # A new program would have no hooks, so the call would not fit it either.
        known = guard._fw_watcher() or self.unhooked.reason(module)
        known = known or left_to_original(module, args, kwargs)
        reason = known or reason
        if not known and self._is_resized(module, args, kwargs, reason):
            return self.by_dynamo(module, args, kwargs, any_size=True, reason=reason)
        try:
            stays = known is not None or self._is_restless(reason)
            extended = not stays and self._extended(module, args, kwargs, reason)
        except LeftToEagerError as error:
            call._fw_warn(first_line(error))
            return self._by_original(module, args, kwargs, first_line(error))
        except CaptureError as error:
            # The programs stay right for the calls that fit them.
            self.foreign.add(sketch_of(module, args, kwargs))
            if isinstance(error, UnguardedError) and not error.by_dynamo:
                self.failed = self.failed or str(error)
            self.places |= Places.named_by(error)
            self.record.unguarded(first_line(error))
            return self.by_dynamo(module, args, kwargs, any_size=True, reason=reason)
        if extended:
            still, result = call._fw_forward(self.modes, module, args, kwargs)
            if still is None:
                return result
            self.refused[kind_of_call(module, args, kwargs, self.changed)] = ""
            reason = still
        call._fw_warn(reason)
        return self._by_original(module, args, kwargs, reason)

    def _by_original(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> Any:
        if not call._fw_compiling():
            self.record.ran_original(reason)
        return original_class(module).forward(module, *args, **kwargs)

    def by_dynamo(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        any_size: bool = False,
        reason: str = "",
    ) -> Any:
        """The result of a call that no program of ours stands for, for this reason, which the
        back-end reads from the stack if it compiles something."""
        # Dynamo does not look for hooks that were added later, and other tracers cannot see it.
        why = call._fw_compiling() or guard._fw_watcher() or self.unhooked.reason(module)
        if why:
            call._fw_warn(str(why))
            return self._by_original(module, args, kwargs, str(why))
        given = values((*args, *kwargs.values()))
        failed = left_by_argument(given) or self.failed
        failed = failed or ("" if self.front else self.reason or reason)
        asked = (module, any_size, self.places, sharing(given))
        run = self.front(*asked) if self.front and not failed else None
        if run is None and not failed:
            failed = self.failed = "values that Dynamo does not guard change too often"
        if run is not None:
            try:
                return run(module, *args, **kwargs)
            except DynamoError as error:
                return self._after_dynamo(module, args, kwargs, error)
            except RuntimeError as error:
                if not is_nested_trace(error):
                    raise
                return self._by_original(module, args, kwargs, "a trace is active")
        call._fw_warn(failed)
        return self._by_original(module, args, kwargs, failed)

    def _after_dynamo(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: DynamoError,
    ) -> Any:
        """The result of a call on which Dynamo failed; it is not asked again."""
        cause = getattr(error, "inner_exception", error)
        failed = f"Dynamo fails on this model: {first_line(cause)}"
        if has_begun(error, original_class(module).forward):
            # To run forward again would repeat its effects. Later calls do not ask Dynamo.
            if not fails_in_eager(original(module), args, kwargs):
                self.failed = failed
            raise error
        result = self._by_original(module, args, kwargs, failed)
        self.failed = failed  # unless eager fails, too
        call._fw_warn(failed)
        return result

    def _is_resized(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> bool:
        """Whether an earlier call was like this one in all but sizes and numbers."""
        named = _RESIZED.match(reason) is not None
        if self.front is None or not (named or self.foreign):
            return False
        sketch = sketch_of(module, args, kwargs)
        known = sketch in self.foreign or (named and sketch in self.sketches)
        self.sketches.add(sketch)
        return known

    @property
    def changed(self) -> tuple[str, ...]:
        """The paths of the attributes that calls are known to change."""
        held = [each.states for each in self.modes if each.states is not None]
        found = [(path, name) for each in held for path, name, _ in each.held]
        found += [(path, n) for each in held for _, path, n in each.effects if isinstance(n, str)]
        return tuple(dict.fromkeys(".".join((*path, name)) for path, name in found))

    def _is_restless(self, reason: str) -> bool:
        """Whether the attribute that the reason names has had too many values."""
        if not reason.startswith("attribute "):
            return False
        name = reason.split(" is not ")[0]
        self.values[name] += 1
        return self.values[name] > MOST_VALUES

    def _extended(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> bool:
        """Whether a new program was made for this kind of call, which fits none for this reason."""
        if guard._fw_watcher() is not None:
            return False
        leaves: list[Any] = []
        structure = guard._fw_flatten((args, kwargs), leaves)
        if guard._FW_UNKNOWN in structure:
            # A guard of ours could not tell this call from the next one.
            raise UnguardedError(f"the arguments are {structure}")
        if any(each.is_nested for each in leaves):
            return False  # Nested tensors have no single shape.
        held = [*leaves, *module.parameters(), *module.buffers()]
        if any(each.device.type not in DEVICES for each in held):
            return False
        kind = kind_of_call(module, args, kwargs, self.changed)
        if self.refused.get(kind):
            raise LeftToEagerError(self.refused[kind])
        if self.specialise is None or kind in self.refused or len(self.modes) >= MOST_PROGRAMS:
            return False
        try:
            names = positional_parameters(original_class(module).forward)
            given = guard._fw_positional(names, args, dict(kwargs))
            modes = self.specialise(original(module), *given, self.changed)
        except CaptureError as error:
            self.refused[kind] = first_line(error) if isinstance(error, LeftToEagerError) else ""
            raise
        except FusewrightError as error:
            warnings.warn(f"no kernels for this call: {error}", RuntimeWarning, stacklevel=2)
            modes = None
        if modes:
            if any(each.training == module.training for each in self.modes):
                self.record.recompiled(type(module).__name__, reason)
            # Last: among programs for all sizes, the first was made for the size that matters.
            self.modes += pin(modes, module)
            return True
        self.refused[kind] = ""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        kept = (self.left_out, self.front, self.reason, frozenset(self.sketches), self.eager)
        places = Places(self.places.rows, self.places.beside, self.places.codes)
        twin = Engine(self.specialise, renewed(self.modes), *kept, places)
        twin.record, twin.source = self.record.for_a_copy(), self.source
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        reason = "" if self.places else self.reason  # the first call finds it again
        kept = (self.left_out, self.front, reason, frozenset[str](), self.eager)
        return Engine, (self.specialise, (), *kept)


def engine_of(module: Any) -> Engine | None:
    """The engine of an optimized module; None for other objects."""
    engine: Engine | None = getattr(module, "__dict__", {}).get(ENGINE)
    return engine
