"""Attributes of modules in the form that guards compare."""

import collections
import hashlib
import types
import typing

import torch

_FW_NUMBERS = (bool, int, float, complex, str)
_FW_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_FW_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FW_HOLDERS = (tuple, list, dict, set, frozenset)
# Longer lists are compared by a digest, and not at each call if the list is the same object.
_FW_LONG = 64


class _FwGone:
    """Stands for a submodule that no longer exists: it contains nothing."""

    _modules: typing.ClassVar[dict[str, typing.Any]] = {}
    _parameters: typing.ClassVar[dict[str, typing.Any]] = {}
    _buffers: typing.ClassVar[dict[str, typing.Any]] = {}
    _forward_hooks = _forward_pre_hooks = _backward_hooks = _backward_pre_hooks = _buffers


def _fw_number(value: typing.Any) -> typing.Any:
    """An attribute that holds no other, in the form that guards compare; `_FwGone` if they do not
    compare it.

    Functions are compared by name: an emitted file has nothing else to compare them with.
    """
    kind = type(value)
    if value is None or kind in _FW_NUMBERS:
        return value
    if kind in _FW_NAMES:
        return ("torch", str(value))
    if kind in _FW_FUNCTIONS:
        # Dynamo compares `__qualname__` as different from any text.
        traced = kind is types.FunctionType and torch.compiler.is_compiling()
        return ("function", value.__code__.co_qualname if traced else value.__qualname__)
    return _FwGone


def _fw_constant(value: typing.Any) -> typing.Any:
    """The same for any attribute."""
    kind = type(value)
    listed = kind in (list, set, frozenset) or isinstance(value, tuple)
    if (listed or kind in (dict, collections.OrderedDict)) and _fw_is_cyclic(value):
        return _FwGone
    if listed:
        inside = [_fw_constant(item) for item in value]
    elif kind in (dict, collections.OrderedDict):
        inside = [_fw_constant(item) for pair in value.items() for item in pair]
    else:
        return _fw_number(value)
    if _FwGone in inside:
        return _FwGone
    if kind in (set, frozenset):
        inside = sorted(inside, key=repr)
    if len(inside) > _FW_LONG:
        inside = [len(inside), hashlib.sha256(repr(inside).encode()).hexdigest()]
    return tuple(inside) if isinstance(value, tuple) else (kind.__name__, *inside)


def _fw_is_cyclic(value: typing.Any, around: tuple[typing.Any, ...] = ()) -> bool:
    """Whether a list, dict or the like contains itself."""
    if not isinstance(value, _FW_HOLDERS):
        return False
    # Dynamo cannot compare dicts by identity.
    traced = torch.compiler.is_compiling()
    if len(around) > _FW_LONG if traced else any(value is each for each in around):
        return True
    around = (*around, value)
    items = value.values() if isinstance(value, dict) else value
    return any(_fw_is_cyclic(item, around) for item in items if isinstance(item, _FW_HOLDERS))


def _fw_same(one: typing.Any, other: typing.Any) -> bool:
    """Whether two constants are the same. 2 and 2.0 differ, as do 0.0 and -0.0; two NaNs do not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_fw_same, one, other))
    if isinstance(one, (float, complex)):
        if torch.compiler.is_compiling():  # a symbol, of which Dynamo knows no text
            return bool(one == other or (one != one and other != other))
        return repr(one) == repr(other)
    return bool(one == other)


def _fw_functions(value: typing.Any) -> tuple[typing.Any, ...]:
    """The functions in an attribute; of methods, the functions."""
    if type(value) in _FW_FUNCTIONS:
        return (getattr(value, "__func__", value),)
    if isinstance(value, _FW_HOLDERS) and not _fw_is_cyclic(value):
        return tuple([each for item in _fw_items(value) for each in _fw_functions(item)])
    return ()


def _fw_items(value: typing.Any) -> list[typing.Any]:
    return [*value, *value.values()] if isinstance(value, dict) else [*value]
