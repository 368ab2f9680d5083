"""Which of the values that Dynamo names as read by forward our guards can compare.

Dynamo names a value by a Python expression over forward's locals `L` and globals `G`. A name is
followed step by step. Each step says whether later calls find the same there: because our guards
compare it, because nobody changes it, or because it is added to the watched places, where a guard
looks for the same object at each call.
"""

from __future__ import annotations

import ast
import collections
import enum
import functools
import os
import sys
import types
from typing import Any

import torch
from torch import nn

from fusewright.runtime import altered, constants

# A dictionary or the path of a submodule, a name in it, and the object that must be there.
Watched = tuple[Any, str, Any]

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
CODE = (types.ModuleType, type, enum.Enum, *_FUNCTIONS, *_OPERATORS)
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)
_SLOTS = (types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType)
_LIBRARIES = frozenset("torch math numpy builtins typing functools operator itertools".split())
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_INHERITED = frozenset(nn.Module().__dict__)
_OF_FUNCTIONS = frozenset("__code__ __name__ __qualname__ __module__ __doc__".split())
# What a guard on a tensor says nothing about.
_OF_TENSORS = frozenset("grad _version is_leaf requires_grad".split())


class Held(enum.Enum):
    """What later calls find under a name."""

    ANYTHING = 0
    OBJECT = 1  # the same object, which may have changed inside
    ALL = 2  # the same, with everything inside


Found = tuple[Held, Any]
_UNKNOWN = object()  # stands for a value that we do not follow
_ANYTHING: Found = (Held.ANYTHING, _UNKNOWN)


class Cell:
    """The variable of an enclosing function, in the form of a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell
        self.first = self._content(constants._FwGone)

    def get(self, name: str, default: Any) -> Any:
        """What the variable holds. Dynamo cannot trace code that reads cells."""
        return self.first if torch.compiler.is_compiling() else self._content(default)

    def _content(self, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # it is empty
            return default


class _Globals(dict[str, Any]):
    """The globals of a frame, with the modules for which Dynamo has names of its own."""

    def __missing__(self, name: str) -> Any:
        if not name.startswith("__import_"):
            raise KeyError(name)
        return sys.modules.get(name.removeprefix("__import_").replace("_dot_", "."))


class Environment:
    """The variables of the process's environment as one text, in the form of a dictionary."""

    def __init__(self) -> None:
        self.first = _variables()

    def get(self, name: str, default: Any) -> Any:
        """The same object for the same variables."""
        return self.first if torch.compiler.is_compiling() else _variables()


def _variables() -> str:
    return sys.intern(repr(sorted(os.environ.items())))


class Reads:
    """Follows Dynamo's names from one frame: a call of `model`."""

    def __init__(self, model: nn.Module, frame: Any) -> None:
        self.model = model
        self.frame = frame
        self.globals = _Globals(frame.globals)
        self.defaults = (*(frame.argdefs or ()), *(frame.kwdefaults or {}).values())
        named = model.named_modules()
        self.paths = {id(each): tuple(name.split(".")) if name else () for name, each in named}
        self.watched: dict[tuple[int, str], Watched] = {}
        for each in model.modules():
            self._of_class(type(each), "forward")

    def held(self, name: str) -> Found:
        """What later calls find under one of Dynamo's names."""
        try:
            tree = ast.parse(name, mode="eval").body
        except SyntaxError:
            return _ANYTHING
        return self._at(tree)

    def value(self, name: str) -> Any:
        """What stands under one of Dynamo's names now; None if the name has words of Dynamo's."""
        try:
            return eval(name, {"L": self.frame.locals, "G": self.globals})
        except (SyntaxError, NameError, LookupError, AttributeError, TypeError):
            return None

    def owner(self, name: str) -> tuple[Found, str]:
        """What has the attribute that Dynamo names, and the attribute's own name."""
        match ast.parse(name, mode="eval").body:
            case ast.Attribute(base, attribute):
                return self._at(base), attribute
            case ast.Call(ast.Name("getattr"), [base, ast.Constant(str(attribute))]):
                return self._at(base), attribute
        return _ANYTHING, name

    def absent(self, owner: Found, name: str) -> bool:
        """Whether a guard can tell that an object still has no attribute of this name."""
        held, value = owner
        if isinstance(value, nn.Module) and id(value) in self.paths:
            place = self.paths[id(value)]
            self.watched[id(value), name] = (place, name, constants._FwGone)
            for kind in type(value).__mro__:
                if not is_library(kind) and not hasattr(kind, name):
                    self.watched[id(kind), name] = (vars(kind), name, constants._FwGone)
            return True
        if isinstance(value, types.ModuleType):
            self.watched[id(value), name] = (vars(value), name, constants._FwGone)
            return True
        return held is Held.ALL

    def watch_method(self, name: str, method: Any) -> None:
        """Watch a method of the class of a value, which Dynamo does not guard."""
        kind = type(self.value(name))
        if not is_library(kind) and hasattr(kind, str(method)):
            self._of_class(kind, str(method))

    def _at(self, node: ast.expr) -> Found:
        match node:
            case ast.Subscript(ast.Name("L"), ast.Constant(str(key))):
                return self._local(key)
            case ast.Subscript(ast.Name("G"), ast.Constant(str(key))):
                return self._global(key)
            case ast.Attribute(base, "__dict__") | ast.Call(ast.Name("dict"), [base]):
                return self._at(base)
            case ast.Attribute(base, name):
                return self.attribute(self._at(base), name)
            case ast.Call(ast.Name("getattr"), [base, ast.Constant(str(name))]):
                return self.attribute(self._at(base), name)
            case ast.Subscript(base, ast.Constant(key)):
                return self._item(self._at(base), key)
            case ast.Call(ast.Attribute(_, "__getitem__"), [base, ast.Constant(key)]):
                return self._item(self._at(base), key)
            case ast.Call(ast.Name("type"), [base]):
                held, value = self._at(base)
                known = held is not Held.ANYTHING and value is not _UNKNOWN
                return (Held.OBJECT, type(value)) if known else (held, value)
            case ast.Subscript(base) | ast.Call(base, []) | ast.Call(_, [base]):
                return _ANYTHING if self._at(base)[0] is not Held.ALL else (Held.ALL, _UNKNOWN)
        return _ANYTHING

    def _local(self, name: str) -> Found:
        value = self.frame.locals.get(name)
        if name in self.frame.code.co_freevars:
            at = self.frame.code.co_freevars.index(name)
            cell = self.frame.closure[at]
            return self._entry(cell, Cell(cell), name)
        if value is self.model:
            return Held.OBJECT, value
        # Guards compare all arguments that are given; the others have forward's own defaults.
        missing = any(value is each for each in self.defaults) and not is_immutable(value)
        return (Held.ANYTHING if missing else Held.ALL), value

    def _global(self, name: str) -> Found:
        if name.startswith("__builtins_dict__"):
            return Held.ALL, self.frame.builtins
        if name.startswith("__import_"):  # Dynamo's own name for the globals of a function
            module = self.globals[name]
            if module is None:
                return _ANYTHING
            # What PyTorch's own functions read makes no difference to results.
            return (Held.ALL if is_library(module) else Held.OBJECT), module
        if name.startswith("___unnamed_scope"):
            return Held.OBJECT, self.frame.globals.get(name)
        return self._entry(self.frame.globals, self.frame.globals, name)

    def _entry(self, owner: Any, place: Any, name: str) -> Found:
        """A name in the dictionary of a module or a class."""
        value = place.get(name, constants._FwGone)
        if not isinstance(value, (*CODE, *_DESCRIPTORS, *_SLOTS)) or value is constants._FwGone:
            return Held.ANYTHING, value
        if not is_library(value):
            self.watched[id(owner), name] = (place, name, value)
        return Held.OBJECT, value

    def attribute(self, owner: Found, name: str) -> Found:
        held, value = owner
        if isinstance(value, torch.Tensor) and name in _OF_TENSORS:
            return _ANYTHING
        if isinstance(value, types.ModuleType) and is_library(value):
            self._of_library(value, name)
        if held is Held.ALL:
            return Held.ALL, getattr(value, name, _UNKNOWN)
        if held is Held.ANYTHING:
            return _ANYTHING
        if isinstance(value, nn.Module):
            return self._of_module(value, name)
        if isinstance(value, types.ModuleType):
            return self._of_namespace(value, name)
        if isinstance(value, type):
            return self._of_class(value, name)
        if isinstance(value, _FUNCTIONS):
            return self._of_function(value, name)
        if isinstance(value, _DESCRIPTORS):
            return Held.OBJECT, getattr(value, name, None)
        if isinstance(value, types.CellType):
            return self._entry(value, Cell(value), name)
        return _ANYTHING

    def _item(self, owner: Found, key: Any) -> Found:
        held, value = owner
        if isinstance(value, (nn.Module, types.ModuleType, type, *_FUNCTIONS)):
            return self.attribute(owner, str(key))
        if held is Held.ANYTHING:
            return _ANYTHING
        item = _got(value, key)
        if held is Held.ALL or is_immutable(item):
            return Held.ALL, item
        if isinstance(value, dict) and "__name__" in value:
            return self._entry(value, value, str(key))
        if isinstance(item, (*CODE, types.CellType, nn.Module)):
            return Held.OBJECT, item
        return _ANYTHING

    def _of_module(self, owner: nn.Module, name: str) -> Found:
        if id(owner) not in self.paths:
            return _ANYTHING
        if name == "_modules":
            return Held.OBJECT, owner._modules
        if name in _INHERITED:
            return Held.ALL, vars(owner)[name]
        for table in (owner._parameters, owner._buffers, owner._modules):
            if name in table:
                return Held.OBJECT, table[name]
        if name not in vars(owner):
            return self._of_class(type(owner), name)
        value = vars(owner)[name]
        if _has_methods(value, owner):
            return Held.ANYTHING, value
        if isinstance(value, (torch.Tensor, *_FUNCTIONS)):
            return Held.OBJECT, value
        if altered._fw_is_pytorchs(type(owner)) and is_library(type(value)):
            return Held.ALL, value
        if constants._fw_constant(value) is constants._FwGone or is_long(value):
            return Held.ANYTHING, value
        return (Held.OBJECT if constants._fw_functions(value) else Held.ALL), value

    def _of_namespace(self, module: types.ModuleType, name: str) -> Found:
        value = vars(module).get(name)
        if not is_library(module):
            return self._entry(module, vars(module), name)
        # A setting of PyTorch.
        if module.__name__.startswith("torch.backends") and type(value) in _IMMUTABLE:
            return _ANYTHING
        deeper = isinstance(value, types.ModuleType)
        return (Held.OBJECT if deeper else Held.ALL), value

    def _of_library(self, module: types.ModuleType, name: str) -> None:
        """Watch a function of PyTorch or the like: some programs put their own in its place."""
        value = vars(module).get(name)
        if isinstance(value, _FUNCTIONS):
            self.watched[id(module), name] = (vars(module), name, value)

    def _of_class(self, kind: type, name: str) -> Found:
        if name in ("__mro__", "__bases__"):
            return Held.OBJECT, getattr(kind, name)
        owner = next((each for each in kind.__mro__ if name in vars(each)), None)
        if owner is None:
            return _ANYTHING
        for each in kind.__mro__[: kind.__mro__.index(owner)]:
            if not is_library(each):
                self.watched[id(each), name] = (vars(each), name, constants._FwGone)
        if is_library(owner) or issubclass(kind, enum.Enum):
            if name == "forward":
                self.watched[id(owner), name] = (vars(owner), name, vars(owner)[name])
            return Held.ALL, vars(owner)[name]
        return self._entry(owner, vars(owner), name)

    def _of_function(self, function: Any, name: str) -> Found:
        value = getattr(function, name, None)
        if name in _OF_FUNCTIONS or (name.endswith("defaults__") and is_immutable(value)):
            return Held.ALL, value
        if name in ("__defaults__", "__kwdefaults__", "__closure__", "__func__", "__globals__"):
            return Held.OBJECT, value
        if name == "__self__" and isinstance(value, nn.Module) and id(value) in self.paths:
            return Held.OBJECT, value
        return _ANYTHING


def _has_methods(value: Any, owner: nn.Module) -> bool:
    """Whether there are methods of other objects in an attribute: guards compare the functions, not
    whose methods they are."""
    if type(value) is types.MethodType:
        return value.__self__ is not owner
    if not isinstance(value, constants._FW_HOLDERS) or constants._fw_is_cyclic(value):
        return False
    return any(_has_methods(item, owner) for item in constants._fw_items(value))


def is_immutable(value: Any) -> bool:
    """Whether nothing in a value can change."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_immutable, value))
    return type(value) in _IMMUTABLE or isinstance(value, enum.Enum)


def hides_changes(value: Any) -> bool:
    """Whether there is a tuple with a list, a dict or a set inside, or an OrderedDict.

    Dynamo takes such a tuple for a constant and compares it with itself. It does not compare the
    order of an OrderedDict.
    """
    if isinstance(value, collections.OrderedDict):
        return True
    if not isinstance(value, constants._FW_HOLDERS) or constants._fw_is_cyclic(value):
        return False
    items = constants._fw_items(value)
    inside = isinstance(value, tuple) and any(isinstance(x, list | dict | set) for x in items)
    return inside or any(map(hides_changes, items))


def is_library(value: Any) -> bool:
    """Whether it is a module or class of PyTorch or the like. Of its names, only functions and the
    forward of a class may be replaced."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    return isinstance(value, type) and value.__module__.partition(".")[0] in _LIBRARIES


def is_long(value: Any) -> bool:
    """Whether our guards would not look at all items of a list at each call."""
    if isinstance(value, tuple | list | dict | set | frozenset):
        items = constants._fw_items(value)
        return len(value) > constants._FW_LONG or any(map(is_long, items))
    return False


def _got(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (TypeError, KeyError, IndexError):
        return _UNKNOWN
