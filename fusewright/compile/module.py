"""The optimized module: the model's own class, state and hooks, with our forward.

For a call that fits no program, `specialise` makes a new one, once per kind of call. If it cannot,
the original forward runs, so a call that eager refuses raises PyTorch's own error.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import linecache
import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from fusewright.build import Artifact, Libraries, build_divided
from fusewright.capture import in_mode
from fusewright.codegen.source import Source
from fusewright.compile.call_kinds import DEVICES, kind_of_call, sketch_of
from fusewright.compile.layouts import other_argument, other_layout
from fusewright.emit.bundle import Arguments, Constant, ModuleBundle, Owner
from fusewright.emit.text import module_text
from fusewright.emit.types import output_types
from fusewright.errors import FusewrightError, UnguardedError
from fusewright.runtime import (
    altered,
    call,
    guard,
    library,
    operators,
    recurrent,
    states,
    tensor_cores,
)
from fusewright.target.device import architecture

Modes = tuple[call._FwMode, ...]
LoadText = Callable[[str], Any]
# Makes the programs of a call; told which attributes the model is known to change.
Specialise = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Sequence[str]], Modes | None]
# The forward of a class, compiled by way of Dynamo, for any sizes or for those of the call.
Front = Callable[[type[nn.Module], bool], Callable[..., Any]]

# A module with this many programs gets no more: its calls vary too much.
MOST_PROGRAMS = 64
# An attribute with more values than this is not a constant (a list of losses, for example).
MOST_VALUES = 8
_ENGINE = "_fw_engine"
_INHERITED = frozenset(nn.Module().__dict__)
# Reasons of the run time that name sizes or numbers.
_RESIZED = re.compile(r"argument .* has shape |the arguments are .* instead of ")


def kernels_of(source: Source, load_text: LoadText) -> library._FwKernels:
    """The source's entries. `load_text` builds their libraries when they are needed."""
    entries = {each.name: each.binding for each in source.entries}
    precise = any(each.terms for each in source.entries)
    kind = tensor_cores._FwPreciseKernels if precise else library._FwKernels
    return kind(entries, source.text, load_text)


def loader(source: Source, device: torch.device, built: list[Artifact]) -> LoadText:
    """Builds and loads the libraries of a text of this source. They are added to `built`."""

    def load_text(text: str) -> Libraries:
        found = build_divided(replace(source, text=text), arch=architecture(device))
        built.extend(found)
        return Libraries(found)

    return load_text


def load(bundle: ModuleBundle, kernels: library._FwKernels) -> Modes:
    """Execute the module's text over these kernels."""
    made = module_text(bundle)
    text = f"{made.drivers}\n\n{made.tables}"
    modes: Modes = executed(text, kernels, bundle.name, output_types(bundle.modes))["_FW_MODES"]
    return modes


def executed(
    text: str, kernels: library._FwKernels, name: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The names that an emitted text defines, over the run time and these kernels."""
    namespace: dict[str, Any] = {}
    for part in (library, guard, altered, call, states, operators, tensor_cores, recurrent):
        namespace.update({k: v for k, v in vars(part).items() if k.lower().startswith("_fw")})
    namespace.update({"torch": torch, "_fw_kernels": kernels, **(more or {})})
    name = f"<fusewright {name} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    # Tracebacks then show the driver's lines.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)
    return namespace


def arguments_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Arguments:
    """The example call, for its guard."""
    names = _parameters(original_class(model).forward)
    args, rest = guard._fw_positional(names, tuple(args), dict(kwargs or {}))
    structure = guard._fw_flatten((args, rest), [])
    plain = not rest and all(isinstance(each, torch.Tensor) for each in args)
    return Arguments(structure, len(args) if plain else -1, names)


def owners_of(model: nn.Module, mode: str, changed: Sequence[str] = ()) -> tuple[Owner, ...]:
    """The model and each submodule in `mode`, with the values that a capture puts into kernels.

    The attributes `changed`, which calls of the model change, are none of them.
    """
    places = [path.rpartition(".") for path in changed]
    left_out = {(id(model.get_submodule(path)), name) for path, _, name in places}
    with in_mode(model, mode):
        return tuple(_owners(model, left_out))


def _owners(model: nn.Module, changed: Container[tuple[int, str]]) -> Iterator[Owner]:
    first: dict[int, tuple[str, ...]] = {}
    # A module with two paths is checked at both: one of them may get another module.
    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(name.split(".")) if name else ()
        tensors = [
            (table, key, tensor is not None and _first(first, tensor, (*path, key)))
            for table in ("_parameters", "_buffers")
            for key, tensor in vars(module)[table].items()
        ]
        children = [key for key, child in module._modules.items() if child is not None]
        hooks = [text for text in altered._fw_hooks(module) if text is not None] if path else []
        kind = altered._fw_kind(module) if path else ""
        constants = _constants(module, bool(path))
        values = tuple((k, v) for k, v in constants if (id(module), k) not in changed)
        yield Owner(path, kind, values, tuple(children), tuple(tensors), tuple(hooks))


def _first(
    known: dict[int, tuple[str, ...]], tensor: torch.Tensor, path: tuple[str, ...]
) -> bool | tuple[str, ...]:
    """The path where the same tensor came first. A graph has it once, so it must stay the same."""
    first = known.setdefault(id(tensor), path)
    return True if first == path else first


def _constants(module: nn.Module, inside: bool) -> Iterator[tuple[str, Constant]]:
    if inside:
        yield "training", module.training
    pytorchs = type(module).__module__.startswith("torch.nn.")
    for name, value in vars(module).items():
        if name in _INHERITED or name.startswith("_fw_"):
            continue
        # The lists of PyTorch's layers follow from their other attributes.
        if pytorchs and isinstance(value, list | dict | set):
            continue
        known = altered._fw_constant(value)
        if known is not altered._FwGone:
            yield name, known


def pin(modes: Modes, model: nn.Module) -> Modes:
    """The programs, with the model's classes and functions themselves.

    Their records have only names, and two classes of a notebook, or two lambdas, can share a name.
    """
    found: list[tuple[tuple[str, ...], str, object]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(name.split(".")) if name else ()
        if path:
            found.append((path, "", type(module)))
        for key, value in vars(module).items():
            if type(value) in altered._FW_FUNCTIONS:
                found.append((path, key, getattr(value, "__func__", value)))
    for mode in modes:
        mode.pinned = tuple(found)
    return modes


@functools.cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters of a class's forward, after self."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in kinds)


class Engine:
    """The programs of one optimized module; `specialise` makes new ones.

    A copy shares the programs. A pickle has none, and its first call makes them again. `left_out`
    are modes that have no program; the user has been told so. With a `reason` why no program can
    stand for other calls, all calls go to `front`. So do calls that differ from one of the
    `sketches` only in sizes and numbers, which Dynamo makes symbolic.
    """

    def __init__(
        self,
        specialise: Specialise | None,
        modes: Modes = (),
        left_out: frozenset[str] = frozenset(),
        front: Front | None = None,
        reason: str = "",
        sketches: frozenset[str] = frozenset(),
    ) -> None:
        self.front = front
        self.reason = reason
        self.sketches = set(sketches)
        self.foreign: set[str] = set()  # sketches of calls that no program can stand for
        self.specialise = specialise
        self.modes = list(modes)
        self.left_out = left_out
        self.refused: set[str] = set()
        self.values: Counter[str] = Counter()

    def answer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> Any:
        """The result of a call that fits no program, for this reason."""
        # The user was told of these when the model was optimized.
        told = any(each.forward_only == reason for each in self.modes)
        if told or ("train" if module.training else "eval") in self.left_out:
            return original_class(module).forward(module, *args, **kwargs)
        # A new program would have no hooks, so the call would not fit it either.
        known = None if call._fw_compiling() else altered._fw_hooked(module)
        known = known or other_layout(module, args, kwargs)
        reason = known or reason
        if not known and self._is_resized(module, args, kwargs, reason):
            return self.by_dynamo(module, args, kwargs, any_size=True)
        try:
            stays = known is not None or self._is_restless(reason)
            extended = not stays and self._extended(module, args, kwargs)
        except UnguardedError:
            # The programs stay right for the calls that fit them.
            self.foreign.add(sketch_of(module, args, kwargs))
            return self.by_dynamo(module, args, kwargs, any_size=True)
        if extended:
            still, result = call._fw_forward(self.modes, module, args, kwargs)
            if still is None:
                return result
            self.refused.add(kind_of_call(module, args, kwargs, self.changed))
            reason = still
        call._fw_warn(reason)
        return original_class(module).forward(module, *args, **kwargs)

    def by_dynamo(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        any_size: bool = False,
    ) -> Any:
        """The result of a call that no program of ours stands for."""
        original = original_class(module)
        # Dynamo does not look for hooks that were added later, and other tracers cannot see it.
        if call._fw_compiling() or guard._fw_watcher() is not None or altered._fw_hooked(module):
            return original.forward(module, *args, **kwargs)
        if (other := other_argument(args, kwargs)) is not None:
            call._fw_warn(other)
            return original.forward(module, *args, **kwargs)
        assert self.front is not None
        return self.front(original, any_size)(module, *args, **kwargs)

    def _is_resized(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> bool:
        """Whether an earlier call was like this one in all but sizes and numbers."""
        named = _RESIZED.match(reason) is not None
        if self.front is None or call._fw_compiling() or not (named or self.foreign):
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
        if call._fw_compiling() or not reason.startswith("attribute "):
            return False
        name = reason.split(" is not ")[0]
        self.values[name] += 1
        return self.values[name] > MOST_VALUES

    def _extended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a new program was made for this kind of call."""
        if call._fw_compiling() or guard._fw_watcher() is not None:
            return False
        leaves: list[Any] = []
        if guard._FW_UNKNOWN in guard._fw_flatten((args, kwargs), leaves):
            return False  # A guard could not tell this call from the next one.
        if any(each.is_nested for each in leaves):
            return False  # Nested tensors have no single shape.
        held = [*leaves, *module.parameters(), *module.buffers()]
        if any(each.device.type not in DEVICES for each in held):
            return False
        kind = kind_of_call(module, args, kwargs, self.changed)
        if self.specialise is None or kind in self.refused or len(self.modes) >= MOST_PROGRAMS:
            return False
        try:
            names = _parameters(original_class(module).forward)
            given = guard._fw_positional(names, args, dict(kwargs))
            modes = self.specialise(original(module), *given, self.changed)
        except UnguardedError:
            raise
        except FusewrightError as error:
            warnings.warn(f"no kernels for this call: {error}", RuntimeWarning, stacklevel=2)
            modes = None
        if modes:
            # Last: among programs for all sizes, the first was made for the size that matters.
            self.modes += pin(modes, module)
            return True
        self.refused.add(kind)
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        kept = (self.left_out, self.front, self.reason, frozenset(self.sketches))
        return Engine(self.specialise, tuple(self.modes), *kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return Engine, (self.specialise, (), self.left_out, self.front, self.reason)


def optimized(
    model: nn.Module,
    modes: Modes = (),
    specialise: Specialise | None = None,
    left_out: frozenset[str] = frozenset(),
    front: Front | None = None,
    reason: str = "",
    sketches: frozenset[str] = frozenset(),
) -> nn.Module:
    """A module that shares all state with the model; its class is a subclass of the model's."""
    made = _fresh(original_class(model))
    made.__dict__.update(model.__dict__)
    made.__dict__.pop("_fw_seen", None)
    made.__dict__[_ENGINE] = Engine(specialise, modes, left_out, front, reason, sketches)
    return made


def original(module: nn.Module) -> nn.Module:
    """The module with its original class and the same object dictionary."""
    plain = object.__new__(original_class(module))
    object.__setattr__(plain, "__dict__", module.__dict__)
    return plain


def original_class(module: nn.Module) -> type[nn.Module]:
    return module._fw_original if isinstance(module, Optimized) else type(module)


class Optimized:
    """The first base of every optimized class; the model's own class is the second."""

    _fw_original: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.__dict__[_ENGINE]
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


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _fresh(kind: type[nn.Module]) -> nn.Module:
    """An empty object of the optimized class for `kind`."""
    if kind not in _SUBCLASSES:
        names = {"_fw_original": kind, "__doc__": kind.__doc__}
        names |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _SUBCLASSES[kind] = type(kind.__name__, (Optimized, kind), names)
    made: nn.Module = object.__new__(_SUBCLASSES[kind])
    return made
