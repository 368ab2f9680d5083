"""Steps of arithmetic as C++ statements: values that are used once become parts of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

NEAR, SPREAD = "fw::Near{}", "near..."
_FLOATS = ("float", "double")
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_INFIX |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# How strongly operators bind. A call or a name binds most.
_STRENGTH = {"*": 3, "/": 3, "+": 2, "-": 2}
_CALL, _UNARY, _COMPARISON = 9, 4, 1
MOST_TEXT = 60  # of an expression that is written into another
MOST_LATER = 30  # the same of a value that a later step reads: signs and names only


@dataclass(frozen=True)
class Step:
    """`const kind name = fw::operator<template>(arguments)`."""

    kind: str
    name: str
    operator: str
    template: str
    arguments: tuple[str, ...]

    @property
    def is_near(self) -> bool:
        return NEAR in self.arguments

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the values that it reads."""
        return tuple(_value(each) for each in self.arguments if each != NEAR)

    def renamed(self, shown: Callable[[str], str]) -> Step:
        arguments = tuple(shown(each) for each in self.arguments)
        return replace(self, name=shown(self.name), arguments=arguments)

    @property
    def line(self) -> str:
        call = f"fw::{self.operator}{self.template}({', '.join(self.arguments)})"
        return f"const {self.kind} {self.name} = {call};"


def _value(argument: str) -> str:
    """A divisor may be made of a value where it is used."""
    return argument.removeprefix("fw::CommonDivisor(").removesuffix(")")


@dataclass(frozen=True)
class _Text:
    text: str
    strength: int = _CALL


class Expressions:
    """Writes the steps of one function. `types` are those of its inputs, and `constants` have a
    type and a text. No call is made earlier or later than by the steps: C++ leaves the order of a
    call's arguments to the compiler. So of the values that are written into an expression, only
    that of the step before may contain calls."""

    def __init__(
        self,
        types: Mapping[str, str],
        constants: Mapping[str, tuple[str, str]],
        columns: int,
    ) -> None:
        self._types = dict(types)
        self._constants, self._columns = constants, columns

    def statements(self, steps: Sequence[Step], outputs: Sequence[str]) -> Iterator[str]:
        """Definitions of the values that are used several times, and assignments of the outputs, or
        a return statement if there is one."""
        self._types |= {step.name: step.kind for step in steps}
        needed = _needed(steps, outputs)
        uses = Counter(name for step in needed for name in step.reads)
        waiting: dict[str, _Text] = {}
        for step, following in zip(needed, [*needed[1:], None], strict=True):
            made = self._written(step, waiting)
            alone = len(outputs) == 1 and step.name == outputs[0]
            start = "return " if alone else f"{step.name} = "
            start = start if step.name in outputs else f"const {step.kind} {step.name} = "
            if alone and uses[step.name]:
                start = f"const {step.kind} {step.name} = "
            for name in self._too_long(start, made.text, step, waiting):
                yield f"const {self._types[name]} {name} = {waiting.pop(name).text};"
                made = self._written(step, waiting)
            once = uses[step.name] == 1 and step.name not in outputs
            for name in step.reads:
                waiting.pop(name, None)
            now = following is not None and step.name in following.reads
            most = MOST_TEXT if now else 0 if "fw::" in made.text else MOST_LATER
            if once and len(made.text) <= most:
                waiting[step.name] = made
            else:
                yield from self._broken(start, made.text)
        if len(outputs) == 1 and uses[outputs[0]]:
            yield f"return {outputs[0]};"

    def _too_long(
        self, start: str, text: str, step: Step, waiting: Mapping[str, _Text]
    ) -> list[str]:
        """The operands that must stand alone for a statement to fit on a line, or on the next."""
        inlined = sorted(
            (name for name in set(step.reads) if name in waiting),
            key=lambda name: -len(waiting[name].text),
        )
        found: list[str] = []
        length = len(text) + 4
        while inlined and length + 1 > self._columns:
            length -= len(waiting[inlined[0]].text) - len(inlined[0])
            found.append(inlined.pop(0))
        return sorted(found, key=list(waiting).index)

    def _broken(self, start: str, text: str) -> Iterator[str]:
        """A statement; if it is too long for a line, it breaks after the sign of assignment."""
        if len(start) + len(text) + 1 <= self._columns or start == "return ":
            yield f"{start}{text};"
        else:
            yield start.rstrip()
            yield f"    {text};"

    def _written(self, step: Step, waiting: Mapping[str, _Text]) -> _Text:
        parts = [self._argument(each, waiting) for each in step.arguments]
        sign = _INFIX.get(step.operator) if step.arguments == step.reads else None
        kinds = {self._type(name) for name in step.reads}
        if sign and len(parts) == 2 and len(kinds) == 1 and kinds <= set(_FLOATS):
            return _infix(sign, *parts)
        if step.operator == "neg" and kinds <= set(_FLOATS):
            return _Text(f"-{_bracketed(parts[0], _CALL)}", _UNARY)
        return _Text(f"fw::{step.operator}{step.template}({', '.join(p.text for p in parts)})")

    def _type(self, name: str) -> str:
        return self._constants[name][0] if name in self._constants else self._types[name]

    def _argument(self, argument: str, waiting: Mapping[str, _Text]) -> _Text:
        if argument == NEAR:
            return _Text(SPREAD)
        name = _value(argument)
        found = waiting.get(name) or _Text(self._constants.get(name, ("", name))[1])
        if name in self._constants and found.text.startswith("-"):
            found = _Text(found.text, _UNARY)
        return found if name == argument else _Text(argument.replace(name, found.text, 1))


def _needed(steps: Sequence[Step], outputs: Sequence[str]) -> list[Step]:
    """The steps on which the outputs depend."""
    wanted, found = set(outputs), []
    for step in reversed(steps):
        if step.name in wanted:
            found.append(step)
            wanted.update(step.reads)
    return found[::-1]


def _infix(sign: str, left: _Text, right: _Text) -> _Text:
    """Two operands with a sign. Those of the same strength are taken from the left, as they were
    computed."""
    strength = _STRENGTH.get(sign, _COMPARISON)
    left_least = strength if strength > _COMPARISON else strength + 1
    return _Text(
        f"{_bracketed(left, left_least)} {sign} {_bracketed(right, strength + 1)}", strength
    )


def _bracketed(part: _Text, least: int) -> str:
    return part.text if part.strength >= least else f"({part.text})"
