"""Attributes that forward changes, as inputs and outputs of a trace.

An attribute whose old value forward reads gives its tensors to the trace as inputs. Its new value
joins the outputs, with an `Effect` that says how to store it. An attribute that is only written
needs no input.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusewright.capture.attributes import MISSING, mapped, tensors_in
from fusewright.capture.source_location import Refused, of_assignment
from fusewright.capture.stand_ins import Appended, Count, Filled, StandIn
from fusewright.capture.tree import UnwritableError, input_text, tree_text
from fusewright.ir.effect import Effect
from fusewright.runtime.guard import _FW_UNKNOWN, _fw_flatten

Key = tuple[str, str]  # the dotted path of a module, and the name of an attribute
STAND_INS: Mapping[str, type[StandIn]] = {"add": Count, "extend": Appended, "update": Filled}


@dataclass(frozen=True)
class Attribute:
    """An attribute that forward changes, or changed at an earlier call.

    `how` is the change: same (none), set (a new value), items (of a list or dict), or the name of
    its stand-in. `read`: forward reads the old value. `written`: which of its tensors forward
    changes in place.
    """

    key: Key
    how: str
    read: bool
    written: tuple[int, ...] = ()

    @property
    def dotted(self) -> str:
        return ".".join(filter(None, self.key))

    @property
    def is_input(self) -> bool:
        """Whether the trace depends on the old value."""
        return self.read and self.how not in STAND_INS


@dataclass(frozen=True)
class Likeness:
    """What a tensor will be like after a call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: Any) -> Any:
        """A tensor's likeness, a symbolic number's example, and anything else as it is."""
        if isinstance(value, torch.SymInt):
            return _example(value)
        if not isinstance(value, torch.Tensor):
            return value
        sizes, strides = map(_example, value.shape), map(_example, value.stride())
        return Likeness(tuple(sizes), tuple(strides), value.dtype, value.device)

    @staticmethod
    def make(value: Any) -> Any:
        """A tensor of this likeness; anything else as it is."""
        if not isinstance(value, Likeness):
            return value
        kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        return torch.empty_strided(value.shape, value.strides, **kind).zero_()


def _example(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


class _Unread:
    """Stands for a value that forward does not read."""


class States:
    """The attributes of one trace; `tensors` are its further inputs, at `paths`.

    After a run, `effects` say how to store the new values, `texts` build them from the outputs, and
    `later` has the values that the next call will find. `written` has the positions of effects that
    write in place, with the outputs that they copy.
    """

    def __init__(self, model: nn.Module, attributes: Sequence[Attribute]) -> None:
        self.modules = dict(model.named_modules())
        self.attributes = tuple(attributes)
        self.old = {each.key: self._now(each.key) for each in attributes}
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        for each in self.attributes:
            for path, tensor in tensors_in(self.old[each.key]) if each.is_input else ():
                self.tensors.append(tensor)
                self.paths.append(".".join((each.dotted, *path)))
        self.effects: list[Effect] = []
        self.texts: list[str] = []
        self.later: dict[Key, Any] = {}
        self.written: dict[int, int] = {}

    def _now(self, key: Key) -> Any:
        return vars(self.modules[key[0]]).get(key[1], MISSING)

    @property
    def held(self) -> tuple[tuple[tuple[str, ...], str, str], ...]:
        """The attributes that the trace depends on: path, name, and everything but tensors as
        text."""
        return tuple(
            (tuple(filter(None, each.key[0].split("."))), each.key[1], self._text(each))
            for each in self.attributes
            if each.is_input
        )

    def _text(self, attribute: Attribute) -> str:
        old = self.old[attribute.key]
        text = "missing" if old is MISSING else _fw_flatten(old, [])
        if _FW_UNKNOWN in text:
            raise Refused(
                f"forward reads and changes the attribute {attribute.dotted}, which holds a "
                f"{type(old).__name__}; keep tensors, numbers, tuples, lists or dicts there",
                of_assignment(self.modules[attribute.key[0]], attribute.key[1]),
            )
        return text

    def place(self, inputs: Sequence[torch.Tensor]) -> dict[Key, Any]:
        """Give each attribute its value in the trace; the last `inputs` are ours."""
        left, placed = list(inputs[len(inputs) - len(self.tensors) :]), {}
        for each in self.attributes:
            value = self.old[each.key]
            if each.how in STAND_INS:
                value = STAND_INS[each.how]()
            elif each.read and value is not MISSING:
                count = len([*tensors_in(value)])
                mine, left = left[:count], left[count:]
                # Tensors that are changed in place must not be inputs themselves.
                mine = [t.clone() if at in each.written else t for at, t in enumerate(mine)]
                value = with_tensors(value, iter(mine))
            elif value is not MISSING:
                value = _Unread()
            if value is not MISSING:
                self.modules[each.key[0]].__dict__[each.key[1]] = value
            placed[each.key] = value
        return placed

    def collect(
        self,
        placed: Mapping[Key, Any],
        inputs: Sequence[torch.Tensor],
        flat: list[Any],
        types: dict[str, type],
    ) -> None:
        """Add the new values to the outputs `flat`, unless they are inputs."""
        self.effects, self.texts, self.later, self.written = [], [], {}, {}
        known = {id(each): input_text(at) for at, each in enumerate(inputs)}
        for each in self.attributes:
            old, new = placed[each.key], self._now(each.key)
            path = tuple(filter(None, each.key[0].split(".")))
            if each.how not in STAND_INS:
                self.later[each.key] = mapped(Likeness.of, new)
            for at, (_, tensor) in enumerate(tensors_in(old) if each.written else ()):
                if at in each.written:
                    name = self.paths[self._first(each) + at]
                    self._add(Effect("write", path, name), tensor, flat, types, known)
                    place = next(at for at, each in enumerate(flat) if each is tensor)
                    self.written[len(self.effects) - 1] = place
            kind, value = _change(each.how, old, new)
            if kind != "same":
                self._add(Effect(kind, path, each.key[1]), value, flat, types, known)

    def end_graphs(
        self, followed: Container[str], depends: Sequence[frozenset[tuple[str, str]]]
    ) -> None:
        """A tensor whose new value does not depend on its old one, not even by an operator in
        place, was detached in place. `depends` has what autograd reaches from each output; it
        follows the inputs at the paths `followed`."""
        for at, output in self.written.items():
            name = self.effects[at].name
            if name in followed and ("constant", name) not in depends[output]:
                self.effects[at] = replace(self.effects[at], kind="rewrite")

    def _first(self, attribute: Attribute) -> int:
        """The position of an attribute's first tensor among the inputs."""
        before = self.attributes[: self.attributes.index(attribute)]
        return sum(len([*tensors_in(self.old[each.key])]) for each in before if each.is_input)

    def _add(
        self,
        effect: Effect,
        value: Any,
        flat: list[Any],
        types: dict[str, type],
        known: Mapping[int, str],
    ) -> None:
        known = {**{id(each): f"o[{at}]" for at, each in enumerate(flat)}, **known}
        try:
            self.texts.append(tree_text(value, flat, types, known))
        except UnwritableError as error:
            owner = self.modules[".".join(effect.owner)]
            raise Refused(
                f"forward sets the attribute {'.'.join((*effect.owner, effect.name))} to a "
                f"{error.what}; keep tensors, numbers, tuples, lists or dicts there",
                of_assignment(owner, effect.name),
            ) from error
        self.effects.append(effect)


def settle(
    model: nn.Module, attributes: Sequence[Attribute], later: Mapping[Key, Any]
) -> Mapping[Key, Any]:
    """Give the attributes the values of the next call. Returns the values that this trace needs."""
    modules = dict(model.named_modules())
    needed = {}
    for each in attributes:
        held = modules[each.key[0]].__dict__
        if each.is_input:
            needed[each.key] = mapped(Likeness.of, held.get(each.key[1], MISSING))
        if each.key in later:
            held[each.key[1]] = mapped(Likeness.make, later[each.key])
    return needed


def is_fit(model: nn.Module, needed: Mapping[Key, Any]) -> Key | None:
    """The first attribute whose value is not as `needed`, or None."""
    modules = dict(model.named_modules())
    for (owner, name), value in needed.items():
        if mapped(Likeness.of, vars(modules[owner]).get(name, MISSING)) != value:
            return owner, name
    return None


def _change(how: str, old: Any, new: Any) -> tuple[str, Any]:
    """The kind of change that was made to the value placed, and what it needs."""
    if how in STAND_INS and type(new) is STAND_INS[how]:
        return how, new.added
    if how == "items" and new is old:
        return ("fill" if isinstance(new, dict) else "items"), new
    return ("same", None) if new is old else ("set", new)


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same structure around other tensors."""
    return mapped(lambda leaf: next(tensors) if isinstance(leaf, torch.Tensor) else leaf, value)
