"""Objects that stand for attributes which forward changes, but whose values it need not know.

A counter is only added to, a list only appended to, a dict only written into. While a model is
traced, a stand-in takes such an attribute's place and accepts this one kind of change. Everything
that would read a value raises `Used`. Then the attribute is treated by its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

_Kind = TypeVar("_Kind", bound=type)


class Used(Exception):
    """Forward reads the value of an attribute that a stand-in stands for."""


def _used(self: object, *args: Any, **kwargs: Any) -> NoReturn:
    raise Used(type(self).__name__)


def _refusing(special: str, named: str = "") -> Callable[[_Kind], _Kind]:
    """Make a class raise `Used` in these methods."""

    def refusing(kind: _Kind) -> _Kind:
        for name in (*(f"__{word}__" for word in special.split()), *named.split()):
            setattr(kind, name, _used)
        return kind

    return refusing


_COMPARED = "eq ne lt le gt ge hash bool repr str format reduce_ex copy deepcopy "
_OF_NUMBERS = (
    "mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow rsub neg pos "
    "abs invert int float complex index round trunc floor ceil and rand or ror xor rxor lshift "
    "rlshift rshift rrshift"
)
_OF_CONTAINERS = "contains getitem delitem iter len reversed add radd mul rmul imul or ror ior"


@_refusing(_COMPARED + _OF_NUMBERS)
class Count:
    """A whole number that forward only adds to. `added` is the sum of what it added."""

    def __init__(self, added: Any = 0) -> None:
        self.added = added

    def __add__(self, other: Any) -> Count:
        if isinstance(other, bool) or not isinstance(other, int | torch.SymInt):
            raise Used("Count")
        return Count(self.added + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Count:
        return self.__add__(-other)


class _Start:
    """The first item of a list that is only appended to. C code reads the items of a list without
    calling its methods, and then meets this one."""


@_refusing(_COMPARED + _OF_CONTAINERS + " setitem", "copy count index insert pop remove reverse")
@_refusing("", "sort clear")
class Appended(list[Any]):
    """A list that forward only appends to. `added` are the new items."""

    def __init__(self) -> None:
        super().__init__([_Start()])

    @property
    def added(self) -> list[Any]:
        return [list.__getitem__(self, at) for at in range(1, list.__len__(self))]

    def __iadd__(self, other: Any) -> Appended:  # type: ignore[misc]
        self.extend(other)
        return self


@_refusing(_COMPARED + _OF_CONTAINERS, "get items keys values pop popitem setdefault clear copy")
class Filled(dict[Any, Any]):
    """A dict that forward only writes into. `added` are the written items."""

    @property
    def added(self) -> dict[Any, Any]:
        return {key: dict.__getitem__(self, key) for key in dict.__iter__(self)}


StandIn = Count | Appended | Filled
