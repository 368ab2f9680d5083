"""What a forward does to its own module besides returning outputs.

A graph has inputs and outputs; an attribute that forward changes is neither. `restored` puts every
attribute back after a run. `changes` lists what forward has changed until then: assigned
attributes, and lists, dicts and other objects that got other contents. Assigning a buffer becomes a
write into the existing buffer.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright.capture.source_location import Refused, of_assignment
from fusewright.capture.stand_ins import Appended, Count, Filled
from fusewright.runtime import altered, constants

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
_TABLES = ("_parameters", "_buffers", "_modules")
_SIMPLE = frozenset({*_PLAIN, type(None), torch.Tensor})
_LISTS = (list, deque)
# Objects that hold no state of a model, or whose state we watch elsewhere.
_UNWATCHED = (
    *(nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(Appended, Count, Filled),
    # Operators of PyTorch keep caches in themselves.
    *(torch._ops.OperatorBase, torch._ops.OpOverloadPacket),
)
# A larger structure, such as a vocabulary, is not watched beyond this many objects.
_MOST_OBJECTS = 4096

MISSING = object()  # stands for an attribute that is not there


@dataclass(frozen=True)
class Before:
    """One module's attributes and tables before the call.

    `inside` has, for each attribute, the lists, dicts and objects that it holds, each with a copy
    of its contents.
    """

    path: str
    module: nn.Module
    attributes: dict[str, Any]
    inside: dict[str, list[tuple[Any, Any]]]
    tables: dict[str, dict[str, Any]]

    def dotted(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


@dataclass(frozen=True)
class Change:
    """An attribute that forward changed. `inside` if the object in it is the same, but got other
    contents."""

    before: Before
    name: str
    inside: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.before.path, self.name


class Changed(Refused):
    """A change that the trace knows nothing of yet."""


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[list[Before]]:
    """Run a forward inside; afterwards all attributes are as they were."""
    before = [_before(path, module) for path, module in model.named_modules()]
    try:
        yield before
    finally:
        for each in before:
            _restore(each)


@contextlib.contextmanager
def copied(model: nn.Module) -> Iterator[None]:
    """Give the model copies of the tensors that its attributes hold, and the originals afterwards.

    A trace runs operators that have no traced operand. If one changes such a tensor in place before
    it is known as an input, the model's own tensor would change.
    """
    own = [(vars(module), own_attributes(module)) for module in model.modules()]
    registered = [*model.parameters(), *model.buffers()]
    made: dict[int, Any] = {id(each): each for each in registered}

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    replaced = [
        (held, name, value)
        for held, attributes in own
        for name, value in attributes.items()
        if any(tensors_in(value))
    ]
    for held, name, value in replaced:
        held[name] = mapped(copy_of, value)
    try:
        yield
    finally:
        for held, name, value in replaced:
            held[name] = value


def fake_buffers(fake_mode: FakeTensorMode, before: Sequence[Before]) -> None:
    """Put fakes into all buffers, inside `restored`: operators on real ones would change them."""
    for each in before:
        for name, buffer in each.tables["_buffers"].items():
            each.module._buffers[name] = None if buffer is None else fake_mode.from_tensor(buffer)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that are not of every module."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def is_pytorchs(module: nn.Module) -> bool:
    """PyTorch's own layers set attributes for internal use, such as the flat weights of an RNN, or
    the `weight` that weight_norm's hook computes at each call."""
    return altered._fw_is_pytorchs(type(module))


def write_buffers(before: Sequence[Before]) -> None:
    """self.b = new becomes self.b.copy_(new): the same values in the same buffer."""
    for each in before:
        held = each.module._buffers
        for name, old in each.tables["_buffers"].items():
            new = held.get(name)
            if old is None or new is None or new is old:
                continue
            _require_fitting(each, name, old, new)
            with torch.no_grad():
                old.copy_(new)
            held[name] = old


def _require_fitting(before: Before, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
    if new.requires_grad or (new.shape, new.dtype) != (old.shape, old.dtype):
        what = "with its gradient history" if new.requires_grad else "with another shape or dtype"
        raise Refused(
            f"forward assigns the buffer {before.dotted(name)} {what}, which a graph cannot "
            "express; assign a detached tensor of the same shape and dtype",
            of_assignment(before.module, name),
        )


def refuse_new_tables(before: Sequence[Before]) -> None:
    """Forward must not add, remove or replace parameters, buffers and submodules."""
    for each in before:
        for table, old in each.tables.items():
            new = vars(each.module)[table]
            for name in {**old, **new}:
                if old.get(name) is not new.get(name):
                    what = {"_parameters": "parameter", "_buffers": "buffer"}.get(table, "module")
                    raise Refused(
                        f"forward adds, removes or replaces the {what} {each.dotted(name)}, which "
                        "a graph cannot express; do this in the constructor",
                        of_assignment(each.module, name),
                    )


def changes(before: Sequence[Before]) -> list[Change]:
    """Everything that has changed in attributes."""
    found: list[Change] = []
    for each in before:
        now = own_attributes(each.module)
        for name in {**each.attributes, **now}:
            if is_pytorchs(each.module) and name in now and name in each.attributes:
                continue
            old, new = each.attributes.get(name, MISSING), now.get(name, MISSING)
            if not same(old, new):
                found.append(Change(each, name))
            elif old is new and _has_new_contents(each.inside.get(name, ())):
                found.append(Change(each, name, inside=True))
    return found


def refuse(change: Change) -> Changed:
    """The error for a change that has no other treatment."""
    before, name = change.before, change.name
    value = before.attributes.get(name)
    within = f" (a {type(value).__name__})" if change.inside else ""
    return Changed(
        f"forward changes the attribute {before.dotted(name)}{within}, which a graph cannot "
        "express; make it a buffer, or return the value",
        of_assignment(before.module, name),
    )


def same(old: Any, new: Any) -> bool:
    """Whether it is the same object, or an equal constant."""
    if old is new:
        return True
    if isinstance(old, tuple) and type(old) is type(new) and len(old) == len(new):
        return all(map(same, old, new))
    return type(old) is type(new) and type(old) in _PLAIN and bool(old == new)


def tensors_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The tensors in tuples, lists and dicts, each with the positions that lead to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Appended | Filled) or (not path and constants._fw_is_cyclic(value)):
        return  # a stand-in lets nobody read it
    elif isinstance(value, tuple | list | dict):
        items = value.values() if isinstance(value, dict) else value
        for at, item in enumerate(items):
            yield from tensors_in(item, (*path, str(at)))


def mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """The same tuples, lists and dicts, of their own classes, around `fn` of the rest."""
    if isinstance(value, dict | list):
        made = copy.copy(value)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(pairs):
            made[key] = mapped(fn, item)
        return made
    if isinstance(value, tuple):
        items = [mapped(fn, item) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return fn(value)


def _before(path: str, module: nn.Module) -> Before:
    own = own_attributes(module)
    seen: set[int] = set()
    # The layers of PyTorch have no objects that we need to watch.
    kinds = (list, dict) if is_pytorchs(module) else object
    watched = {n: v for n, v in own.items() if type(v) not in _SIMPLE and isinstance(v, kinds)}
    inside = {name: list(_contents(value, seen)) for name, value in watched.items()}
    tables = {name: dict(vars(module)[name]) for name in _TABLES}
    return Before(path, module, own, {n: each for n, each in inside.items() if each}, tables)


def _contents(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """The lists, dicts and objects in `value`, each with a copy of its contents."""
    if id(value) in seen or isinstance(value, _UNWATCHED) or len(seen) >= _MOST_OBJECTS:
        return
    items = _items(value)
    if items is None and not isinstance(value, tuple | frozenset):
        return
    seen.add(id(value))
    if items is not None:
        yield value, items
    for item in value if items is None else items.values() if type(items) is dict else items:
        yield from _contents(item, seen)


def _items(value: Any) -> Any:
    """A copy of what can change in an object, or None."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, _LISTS):
        return list(value)
    if isinstance(value, set):
        return set(value)
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _has_new_contents(inside: Sequence[tuple[Any, Any]]) -> bool:
    return any(not _same_contents(value, items) for value, items in inside)


def _same_contents(value: Any, items: Any) -> bool:
    now = _items(value)
    if isinstance(now, set):
        return bool(now == items)
    if isinstance(now, list):
        return same(tuple(items), tuple(now))
    if isinstance(value, dict) and [*now] != [*items]:
        return False
    # An object may add attributes for its own use, such as a cached property.
    added = [now[name] for name in now if name not in items]
    kept = all(name in now and same(old, now[name]) for name, old in items.items())
    return kept and not any(isinstance(each, torch.Tensor) for each in added)


def _restore(before: Before) -> None:
    for name in set(vars(before.module)) - set(before.attributes) - _OF_EVERY_MODULE:
        del before.module.__dict__[name]
    before.module.__dict__.update(before.attributes)
    for inside in before.inside.values():
        for value, items in inside:
            _refill(value, items)
    for table, entries in before.tables.items():
        held = vars(before.module)[table]
        held.clear()
        held.update(entries)


def _refill(value: Any, items: Any) -> None:
    held: Any = value if isinstance(value, (dict, set, *_LISTS)) else vars(value)
    if not _same_contents(value, items) or len(held) != len(items):
        held.clear()
        (held.extend if isinstance(value, _LISTS) else held.update)(items)
