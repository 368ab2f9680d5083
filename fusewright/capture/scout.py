"""Which attributes a forward changes, and how: found by running it on fake tensors.

A trace cannot find this out by itself: a tensor that is changed in place must be an input of the
trace before it starts. So the model runs first without one, as often as new changes are found.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusewright.capture.attributes import (
    MISSING,
    Before,
    Change,
    changes,
    copied,
    fake_buffers,
    is_pytorchs,
    own_attributes,
    refuse,
    restored,
    tensors_in,
)
from fusewright.capture.call import ModelCall
from fusewright.capture.source_location import Refused, of_assignment
from fusewright.capture.state import STAND_INS, Attribute, Key, with_tensors


@dataclass(frozen=True)
class _Look:
    """One run: the value that each attribute had before and after, the changes, the attributes
    whose old values were read, and which of their tensors were changed in place."""

    old: Mapping[Key, Any]
    new: Mapping[Key, Any]
    changed: Mapping[Key, Change]
    read: frozenset[Key]
    written: Mapping[Key, tuple[int, ...]]
    error: Exception | None

    @property
    def names(self) -> frozenset[Key]:
        return frozenset(self.changed) | frozenset(self.written)


def scout(model: nn.Module, call: ModelCall, known: frozenset[Key]) -> tuple[Attribute, ...]:
    """The attributes that forward changes, and of the `known` ones those that it reads."""
    names = known
    while True:
        look = _look(model, call, names, {})
        if look.names <= names and look.error is not None and not names >= (more := _all(model)):
            names |= more  # perhaps a tensor that cannot be changed in place as it is
        elif look.names <= names:
            break
        names |= look.names
    if look.error is not None:
        raise look.error
    stand_ins: dict[Key, str] = {}
    for key, how in _candidates(look):
        trial = _look(model, call, names, {**stand_ins, key: how})
        if trial.error is None and trial.names <= names and type(trial.new[key]) is STAND_INS[how]:
            stand_ins[key] = how
    found = (_attribute(look, key, stand_ins.get(key)) for key in look.old if key in names)
    return tuple(each for each in found if each is not None)


def _all(model: nn.Module) -> frozenset[Key]:
    """The attributes that hold tensors."""
    return frozenset(
        (path, name)
        for path, module in model.named_modules()
        if not is_pytorchs(module)
        for name, value in own_attributes(module).items()
        if any(tensors_in(value))
    )


def _candidates(look: _Look) -> Iterator[tuple[Key, str]]:
    """Changes for which a stand-in may do."""
    for key, change in look.changed.items():
        old, new = look.old[key], look.new[key]
        if type(old) is int and type(new) is int and key in look.read:
            yield key, "add"
        elif change.inside and type(old) in (list, deque, dict):
            yield key, "update" if type(old) is dict else "extend"


def _attribute(look: _Look, key: Key, stand_in: str | None) -> Attribute | None:
    change, read, written = look.changed.get(key), key in look.read, look.written.get(key, ())
    if change is None and not written:
        return Attribute(key, "same", True) if read else None
    if stand_in is not None:
        return Attribute(key, stand_in, True)
    if change is not None and look.new[key] is MISSING:
        before = change.before
        raise Refused(
            f"forward deletes the attribute {before.dotted(change.name)}, which a graph cannot "
            "express; set it to None",
            of_assignment(before.module, change.name),
        )
    if change is not None and change.inside and not _is_listed(change):
        raise refuse(change)
    how = "same" if change is None else "items" if change.inside else "set"
    return Attribute(key, how, read or bool(written), written)


def _is_listed(change: Change) -> bool:
    """Whether everything that changed inside is a list or a dict."""
    held = change.before.inside[change.name]
    top = change.before.attributes[change.name]
    return isinstance(top, list | dict) and all(isinstance(v, list | dict) for v, _ in held)


def _look(
    model: nn.Module, call: ModelCall, names: frozenset[Key], stand_ins: Mapping[Key, str]
) -> _Look:
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    fakes = [_fake(fake_mode, x) if isinstance(x, torch.Tensor) else x for x in call.leaves]
    args, kwargs = pytree.tree_unflatten(fakes, call.spec)
    error: Exception | None = None
    with copied(model), restored(model) as original, torch.enable_grad():
        fake_buffers(fake_mode, original)
        _place(fake_mode, original, names, stand_ins)
        with restored(model) as before, fake_mode:
            old = _values(before)
            versions = {key: _versions(value) for key, value in old.items()}
            with _reading(before) as read:
                try:
                    model(*args, **kwargs)
                except Exception as raised:  # told to the caller, with what was seen until then
                    error = raised
            changed = {each.key: each for each in changes(before)}
            new = _values(before, now=True)
            written = {key: _written(old[key], each) for key, each in versions.items()}
    old = {**dict.fromkeys(new, MISSING), **old}
    new = {**dict.fromkeys(old, MISSING), **new}
    in_place = {key: each for key, each in written.items() if each}
    return _Look(old, new, changed, frozenset(read), in_place, error)


def _fake(fake_mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake that autograd follows, and that may be changed in place, as results may."""
    fake = fake_mode.from_tensor(tensor.detach())
    wanted = tensor.is_floating_point() or tensor.is_complex()
    return fake.requires_grad_(wanted)


def _place(
    fake_mode: FakeTensorMode,
    original: Sequence[Before],
    names: frozenset[Key],
    stand_ins: Mapping[Key, str],
) -> None:
    """Put stand-ins and fakes into the attributes with these names."""
    for each in original:
        for name, value in each.attributes.items():
            key = (each.path, name)
            if key in stand_ins:
                vars(each.module)[name] = STAND_INS[stand_ins[key]]()
            elif key in names:
                fakes = [_fake(fake_mode, tensor).clone() for _, tensor in tensors_in(value)]
                vars(each.module)[name] = with_tensors(value, iter(fakes))


def _values(before: Sequence[Before], now: bool = False) -> dict[Key, Any]:
    return {
        (each.path, name): value
        for each in before
        if not is_pytorchs(each.module)
        for name, value in (own_attributes(each.module) if now else each.attributes).items()
    }


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(0 if t.is_inference() else t._version for _, t in tensors_in(value))


def _written(value: Any, versions: Sequence[int]) -> tuple[int, ...]:
    """Which tensors in a value have been changed in place."""
    now = _versions(value)
    return tuple(at for at, (a, b) in enumerate(zip(versions, now, strict=False)) if a != b)


@contextlib.contextmanager
def _reading(before: Sequence[Before]) -> Iterator[set[Key]]:
    """Collects the attributes that are read while they still have the values of `before`."""
    read: set[Key] = set()
    watched = {id(each.module): each for each in before if not is_pytorchs(each.module)}
    kinds = {type(each.module) for each in watched.values()}
    plain: dict[type, Any] = {kind: kind.__getattribute__ for kind in kinds}
    own = {kind: each for kind, each in plain.items() if "__getattribute__" in vars(kind)}

    def reading(kind: type) -> Any:
        def read_attribute(self: Any, name: str) -> Any:
            each = watched.get(id(self))
            if each is not None:
                held = object.__getattribute__(self, "__dict__")
                if held.get(name, MISSING) is each.attributes.get(name, MISSING):
                    read.add((each.path, name))
            return plain[kind](self, name)

        return read_attribute

    for kind in kinds:
        kind.__getattribute__ = reading(kind)  # type: ignore[method-assign]
    try:
        yield read
    finally:
        for kind in kinds:
            if kind in own:
                kind.__getattribute__ = own[kind]  # type: ignore[method-assign]
            else:
                del kind.__getattribute__
