"""What a forward does to its own module besides returning outputs.

A graph has inputs and outputs; an attribute that forward assigns is neither. Assigning a buffer
becomes a write into the existing buffer. Any other change is refused by name, because the kernels
would silently omit it. In both cases the module is restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusewright.capture.source_location import Refused, of_assignment

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str)
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class _Before:
    """One module's attributes and tables before the call; `inside` has its lists' and dicts'
    items."""

    path: str
    module: nn.Module
    attributes: dict[str, Any]
    inside: dict[str, list[Any]]
    tables: dict[str, dict[str, Any]]


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Run a forward inside: changes become writes into buffers, or one named error."""
    before = [_before(path, module) for path, module in model.named_modules()]
    try:
        yield
        for each in before:
            _write_buffers(each)
            _refuse_changes(each)
    finally:
        for each in before:
            _restore(each)


def _before(path: str, module: nn.Module) -> _Before:
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    inside = {name: _items(value) for name, value in own.items() if type(value) in (list, dict)}
    tables = {name: dict(vars(module)[name]) for name in _TABLES}
    return _Before(path, module, own, inside, tables)


def _items(value: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _write_buffers(before: _Before) -> None:
    """self.b = new becomes self.b.copy_(new): the same values in the same buffer."""
    held = before.module._buffers
    for name, old in before.tables["_buffers"].items():
        new = held.get(name)
        if old is None or new is None or new is old:
            continue
        if new.requires_grad or (new.shape, new.dtype) != (old.shape, old.dtype):
            what = (
                "with its gradient history" if new.requires_grad else "with another shape or dtype"
            )
            raise Refused(
                f"forward assigns the buffer {_dotted(before, name)} {what}, which a graph cannot "
                "express; assign a detached tensor of the same shape and dtype",
                of_assignment(before.module, name),
            )
        with torch.no_grad():
            old.copy_(new)
        held[name] = old


def _refuse_changes(before: _Before) -> None:
    now = {name: v for name, v in vars(before.module).items() if name not in _OF_EVERY_MODULE}
    changed = [name for name in {**before.attributes, **now} if _changed(before, now, name)]
    for table, old in before.tables.items():
        new = vars(before.module)[table]
        changed += [name for name in {**old, **new} if old.get(name) is not new.get(name)]
    if changed:
        raise Refused(
            f"forward changes the attribute {_dotted(before, changed[0])}, which a graph cannot "
            "express; make it a buffer, or return the value",
            of_assignment(before.module, changed[0]),
        )


def _changed(before: _Before, now: dict[str, Any], name: str) -> bool:
    if name not in now or name not in before.attributes:
        return True
    if _is_pytorchs(before.module):
        return False
    if name in before.inside and before.attributes[name] is now[name]:
        return not _same(tuple(before.inside[name]), tuple(_items(now[name])))
    return not _same(before.attributes[name], now[name])


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, tuple) and type(old) is type(new) and len(old) == len(new):
        return all(map(_same, old, new))
    return type(old) is type(new) and type(old) in _PLAIN and bool(old == new)


def _is_pytorchs(module: nn.Module) -> bool:
    """PyTorch's own layers set attributes for internal use, such as the flat weights of an RNN, or
    the `weight` that weight_norm's hook computes at each call."""
    return type(module).__module__.startswith("torch.nn.")


def _restore(before: _Before) -> None:
    for name in set(vars(before.module)) - set(before.attributes) - _OF_EVERY_MODULE:
        del before.module.__dict__[name]
    before.module.__dict__.update(before.attributes)
    for name, items in before.inside.items():
        value = before.attributes[name]
        if isinstance(value, dict):
            value.clear()
            value.update(items)
        else:
            value[:] = items
    for table, entries in before.tables.items():
        held = vars(before.module)[table]
        held.clear()
        held.update(entries)


def _dotted(before: _Before, name: str) -> str:
    return f"{before.path}.{name}" if before.path else name
