"""What the code of a model may read, by the names in it.

The code is that of each module's forward, and of each function whose name it uses and that can be
found in a global, a class, an attribute or an enclosing variable. This finds too much rather than
too little. It says where random numbers come from, and it takes the place of Dynamo's guards for a
model that Dynamo cannot trace.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fusewright.capture.attributes import is_pytorchs, own_attributes
from fusewright.capture.beside import content
from fusewright.capture.reads import (
    CODE,
    Environment,
    Watched,
    hides_changes,
    is_immutable,
    is_library,
    is_long,
)
from fusewright.runtime import constants

# Draws the numbers of the functions of `random`.
_PYTHONS: Any = getattr(random.random, "__self__", None)
_DEFAULT = "a default argument"
_STATE = (torch.Tensor, nn.Module, torch.Generator)
_WITH_EFFECTS = frozenset("print input open exec eval breakpoint".split())
# Of Python's library. `random` has its own rules.
_WITHOUT_EFFECTS = frozenset(
    "abc array bisect builtins cmath collections contextlib copy dataclasses decimal enum "
    "fractions functools heapq inspect itertools math numbers operator os pathlib random re "
    "statistics string struct textwrap types typing weakref".split()
)
_OF_ENVIRONMENT = frozenset("environ environb getenv getenvb".split())
_CONTAINERS = (list, dict, set, deque)
_CHANGING = frozenset(
    "append appendleft add update extend insert pop popleft popitem clear setdefault remove "
    "discard reverse sort move_to_end".split()
)
_NOT_THE_MODELS = sys.stdlib_module_names | {"torch", "numpy", "fusewright"}


class Reachable:
    """The functions of a model, each with the names in its code."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [each for each in model.modules() if not is_pytorchs(each)]
        named = ((name, each) for name, each in model.named_modules() if not is_pytorchs(each))
        self.paths = {tuple(filter(None, name.split("."))): each for name, each in named}
        self.kinds = {kind for each in self.modules for kind in type(each).__mro__}
        self.functions: dict[types.FunctionType, frozenset[str]] = {}
        waiting: list[Any] = [type(each).forward for each in self.modules]
        waiting += [vars(each)["forward"] for each in self.modules if "forward" in vars(each)]
        waiting = [function for each in waiting for function in _functions_of(each)]
        while waiting:
            self.functions |= {each: frozenset(_names(each.__code__)) for each in waiting}
            waiting = [each for each in self._named() if each not in self.functions]

    @property
    def names(self) -> set[str]:
        return {name for names in self.functions.values() for name in names}

    def _named(self) -> Iterator[types.FunctionType]:
        """The functions that the names may stand for."""
        names = self.names
        for _, _, value in [*self._values(), *self._attributes()]:
            yield from _functions_of(value)
        for kind in self.kinds:
            if not is_library(kind):
                for name in names & vars(kind).keys():
                    yield from _functions_of(vars(kind)[name])

    def _values(self) -> Iterator[tuple[types.FunctionType, str, Any]]:
        """What each function's names may stand for in globals and enclosing variables."""
        for function, names in self.functions.items():
            held = function.__globals__
            for name in names & held.keys():
                yield function, name, held[name]
                for inner in names & _names_of_module(held[name]).keys():
                    yield function, f"{name}.{inner}", vars(held[name])[inner]
            enclosed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            for name, cell in enclosed:
                yield function, name, content(cell)
            named = function.__kwdefaults__ or {}
            for value in (*(function.__defaults__ or ()), *named.values()):
                yield function, _DEFAULT, value

    def _attributes(self) -> Iterator[tuple[None, str, Any]]:
        names = self.names
        for module in self.modules:
            for name, value in own_attributes(module).items():
                if name in names:
                    yield None, f"self.{name}", value

    def _of_classes(self) -> Iterator[tuple[type, str, Any]]:
        """What the model's own classes hold."""
        for kind in self.kinds:
            if not is_library(kind):
                yield from ((kind, name, value) for name, value in [*vars(kind).items()])

    def draws(
        self, codes: Container[types.CodeType] | None = None
    ) -> Iterator[tuple[str, bool, bool]]:
        """From where functions with these codes, or all, may draw random numbers.

        With each, whether that is a generator of the process, Python's or NumPy's, and whether
        Dynamo draws the same numbers.
        """
        kinds = generators()
        for function, name, value in [*self._values(), *self._attributes()]:
            if codes is not None and (function is None or function.__code__ not in codes):
                continue
            owner = getattr(value, "__self__", value) if isinstance(value, CODE) else value
            if value is random or owner is _PYTHONS:
                # A generator that forward itself makes: Dynamo does not know it.
                made = value is random and function and "Random" in self.functions[function]
                yield name, True, not made
            elif isinstance(owner, kinds):
                yield name, False, False
            elif value is getattr(_numpy(), "random", kinds):
                yield name, True, False
            elif value is _numpy() and function and "random" in self.functions[function]:
                yield f"{name}.random", True, False

    def unguarded(self) -> Iterator[str]:
        """What may change without any guard of ours noticing it, or must run at each call."""
        yield from self.effects()
        for _, name, value in self._values():
            if not _is_code(value) and not (name == _DEFAULT and is_immutable(value)):
                yield name
        for _, name, value in self._attributes():
            if constants._fw_constant(value) is constants._FwGone or is_long(value):
                yield name
        names = self.names
        for kind, name, value in self._of_classes():
            if name in names and not _is_code(value) and not hasattr(type(value), "__get__"):
                yield f"{kind.__name__}.{name}"

    def watched(self, codes: Container[types.CodeType] | None = None) -> Iterator[Watched]:
        """Places where functions with these codes, or all, find something that Dynamo does not
        guard: methods of the model's classes, names that may hide a builtin or be missing, the
        environment."""
        used = {f for f in self.functions if codes is None or f.__code__ in codes}
        for kind, name, value in self._of_classes():
            if any(each in used for each in _functions_of(value)):
                yield vars(kind), name, value
        names = frozenset().union(*(self.functions[each] for each in used))
        for path, module in self.paths.items():
            yield from ((path, name, constants._FwGone) for name in _virtual(module, names))
        for function in used:
            held, loaded = function.__globals__, _loaded(function.__code__)
            for name in loaded - held.keys():
                yield held, name, constants._FwGone
            if self.functions[function] & _OF_ENVIRONMENT:
                place = Environment()
                yield place, "", place.first

    def assigned(self) -> str:
        """A variable outside the model that a function assigns, which a real call or a trace of a
        copy would do, too; empty if there is none."""
        for function in self.functions:
            for name in _assigned(function.__code__):
                if name in function.__globals__ or name in function.__code__.co_freevars:
                    return name
        return ""

    def shares(self) -> bool:
        """Whether a call of a copy may change globals, enclosing variables or classes."""
        if next(self.effects(), ""):
            return True
        if any(_may_change(value, function.__code__) for function, _, value in self._values()):
            return True
        return self.changes_classes()

    def changes_classes(self) -> bool:
        """Whether a function assigns an attribute with the name of one of a class."""
        stored = {name for each in self.functions for name in _stored(each.__code__)}
        return any(name in stored for _, name, _ in self._of_classes())

    def effects(self) -> Iterator[str]:
        """Functions of Python that do something besides returning a value, or return another one
        each time: `print`, and what is in modules such as `time`, `warnings` or `sys`."""
        for function in self.functions:
            builtin = _loaded(function.__code__) - function.__globals__.keys()
            yield from sorted(builtin & _WITH_EFFECTS)
        yield from (name for _, name, value in self._values() if _has_effects(value))

    def differentiates_twice(self) -> bool:
        """Whether a function asks for gradients that can be differentiated again."""
        known = (each for f in self.functions for each in f.__code__.co_consts)
        return any(isinstance(each, tuple) and "create_graph" in each for each in known)

    def has_mutable_defaults(self, codes: Container[types.CodeType]) -> bool:
        """Whether functions with these codes have default arguments that can change."""
        found = [v for f, name, v in self._values() if name == _DEFAULT and f.__code__ in codes]
        return any(not is_immutable(each) and not isinstance(each, CODE) for each in found)

    def holds_state(self) -> bool:
        """Whether a global or an enclosing variable is a tensor, a module or a generator, so that a
        call may change what copies of the model share."""
        found = [value for _, _, value in self._values()]
        found = [each for each in found if not constants._fw_is_cyclic(each)]
        return any(isinstance(each, _STATE) for each in pytree.tree_leaves(found))

    def unnoticed(self) -> Iterator[str]:
        """Attributes in which Dynamo does not notice a change."""
        return (name for _, name, value in self._attributes() if hides_changes(value))


def generators() -> tuple[type, ...]:
    """The classes of objects that random numbers are drawn from."""
    numpy = _numpy()
    more = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (random.Random, *more)


def _numpy() -> Any:
    return sys.modules.get("numpy")


def _is_code(value: Any) -> bool:
    """Whether it is a function, a class or a module, or a tuple of such."""
    inside = value if type(value) is tuple else (value,)
    return all(isinstance(each, CODE) for each in inside)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _virtual(module: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Those names that only a `__getattr__` of the user answers: an attribute would hide it."""
    found = next(kind for kind in type(module).__mro__ if "__getattr__" in vars(kind))
    if is_library(found):
        return
    tables = (vars(module), module._parameters, module._buffers, module._modules)
    for name in names:
        if not any(name in each for each in tables) and not hasattr(type(module), name):
            yield name


def _assigned(code: types.CodeType) -> Iterator[str]:
    """The global and enclosed variables that code assigns, or of which it assigns an attribute."""
    before = ""
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"):
            yield str(step.argval)
        elif step.opname == "STORE_ATTR" and before:
            yield before
        before = str(step.argval) if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else ""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _assigned(each)


def _loaded(code: types.CodeType) -> frozenset[str]:
    """The names that code looks up in its globals and in the builtins."""
    steps = dis.get_instructions(code)
    inside = (each for each in code.co_consts if isinstance(each, types.CodeType))
    found = frozenset(str(each.argval) for each in steps if each.opname == "LOAD_GLOBAL")
    return found.union(*map(_loaded, inside))


def _may_change(value: Any, code: types.CodeType) -> bool:
    """Whether code may change an object that it finds outside the model."""
    if isinstance(value, _CONTAINERS):
        stores = any(each.opname == "STORE_SUBSCR" for each in dis.get_instructions(code))
        return stores or not _CHANGING.isdisjoint(_names(code))
    known = _is_code(value) or is_immutable(value)
    return not known and _is_the_models(type(value).__module__)


def _has_effects(value: Any) -> bool:
    """Whether it is a module of Python's library, or a function in one, that is not known to be
    without effects."""
    known = isinstance(value, types.ModuleType)
    found = value.__name__ if known else getattr(value, "__module__", None)
    if not known and not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    root = str(found).partition(".")[0]
    return root in sys.stdlib_module_names and root not in _WITHOUT_EFFECTS


def _stored(code: types.CodeType) -> Iterator[str]:
    """The names of attributes that code assigns."""
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR":
            yield str(step.argval)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _stored(each)


def _is_the_models(name: object) -> bool:
    return str(name).partition(".")[0] not in _NOT_THE_MODELS


def _names_of_module(value: Any) -> dict[str, Any]:
    """The names in a module that is not a library."""
    if isinstance(value, types.ModuleType) and _is_the_models(value.__name__):
        return vars(value)
    return {}


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The functions in a value, with those that they wrap."""
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        yield from _functions_of(value.__func__)
    elif isinstance(value, property):
        yield from _functions_of(value.fget)
    elif isinstance(value, functools.partial | functools.cached_property):
        yield from _functions_of(value.func)
    elif isinstance(value, type) and _is_the_models(value.__module__):
        yield from (each for each in vars(value).values() if type(each) is types.FunctionType)
    elif type(value) in (tuple, list, dict) and len(value) <= constants._FW_LONG:
        if constants._fw_is_cyclic(value):
            return
        for item in constants._fw_items(value):
            yield from _functions_of(item)
    elif isinstance(value, types.FunctionType) and _is_the_models(value.__module__):
        yield value
        yield from _functions_of(getattr(value, "__wrapped__", None))
