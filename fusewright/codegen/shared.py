"""Functors of the same structure: one struct, with the sizes in which they differ as parameters.

Two functors have the same structure if their texts are equal up to whole numbers, and their
arithmetic up to names. The numbers are still constants when the compiler sees them, so the machine
code is the same. Functors of another structure may still have the same arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusewright.codegen.layout import COLUMNS, definition, filled
from fusewright.codegen.source import Functor

# A function is no name of a value, though many values are called like the operator that made them.
_TOKEN = re.compile(r"(?:fw::)?[A-Za-z_]\w*\(?|\d[\w.]*|\S")
_NUMBER = re.compile(r"\d+")
_ENDINGS = ("ptr", "kept", "lanes", "divisor", "wide", "run", "tile", "")
MATH = "fused"  # the namespace of the arithmetic
_Tokens = tuple[str, ...]
_Key = tuple[_Tokens, _Tokens]
LARGEST = 2**31 - 1  # of a number that has the type int


@dataclass(frozen=True)
class Group:
    """Functors of one structure. The first one's text is that of all. `numbers` has, for each
    number of the text, its values in all of them. `math` is the functor with their arithmetic."""

    members: tuple[Functor, ...]
    numbers: tuple[tuple[str, ...], ...]
    math: Functor

    @property
    def parameters(self) -> dict[tuple[str, ...], str]:
        """A name for each number that differs, by its values."""
        different = dict.fromkeys(each for each in self.numbers if len(set(each)) > 1)
        return {values: f"kN{at}" for at, values in enumerate(different)}


def grouped_functors(functors: Iterable[Functor]) -> list[Group]:
    """The functors by structure, in the order of their first members."""
    found: dict[_Key, list[Functor]] = {}
    math: dict[_Tokens, Functor] = {}
    for each in functors:
        found.setdefault(_structure(each), []).append(each)
    groups: list[Group] = []
    for (arithmetic, _), members in found.items():
        shared = math.setdefault(arithmetic, members[0])
        rows = list(zip(*(_numbers(each) for each in members), strict=True))
        if any(int(value) > LARGEST for row in rows for value in row if len(set(row)) > 1):
            groups += [Group((each,), (), shared) for each in members]
        else:
            groups.append(Group(tuple(members), tuple(rows), shared))
    return groups


def _numbers(functor: Functor) -> list[str]:
    return [token for token in _TOKEN.findall("\n".join(functor.lines)) if token.isdigit()]


def _structure(functor: Functor) -> _Key:
    """The tokens of a functor's arithmetic and of its struct, with numbers for names."""
    math, lines = (_TOKEN.findall("\n".join(each)) for each in (functor.math, functor.lines))
    first, second = _Names(functor), _Names(functor)
    return (
        tuple(first[token] for token in math),
        tuple(second["#" if token.isdigit() else token] for token in lines),
    )


class _Names(dict[str, str]):
    """Tokens by themselves, and names of a functor by numbers, in the order in which they occur."""

    def __init__(self, functor: Functor) -> None:
        super().__init__()
        self._own, self._numbers = functor.names, dict[str, str]()

    def __missing__(self, token: str) -> str:
        stem, _, ending = token.rpartition("_")
        if token in self._own:
            stem, ending = token, ""
        elif stem not in self._own or ending not in _ENDINGS:
            return self.setdefault(token, token)
        number = self._numbers.setdefault(stem, f"@{len(self._numbers)}")
        return self.setdefault(token, f"{number}_{ending}")


def functor_lines(group: Group) -> list[str]:
    """The struct of a group, and what it is called for each of its members."""
    first, parameters = group.members[0], group.parameters
    base = f": fw::Functor<{f'{MATH}::{group.math.name}' if first.math else ''}> {{"
    if len(group.members) == 1:
        struct = _head(f"struct {first.name}_body", base)
        return ["", "template <typename I>", *struct, *first.lines]
    numbers = iter(group.numbers)

    def written(found: re.Match[str]) -> str:
        if not _NUMBER.fullmatch(found.group()):
            return found.group()
        values = next(numbers)
        return parameters.get(values, found.group())

    text = _TOKEN.sub(written, "\n".join(first.lines))
    # A parameter before a sign would look like a type.
    text = re.sub(r"(FW_(?:EXTENTS|OUTER)\(.*)", _bracketed, text)
    shape = f"{first.name}_shape"
    named = [f"int {name}" for name in parameters.values()]
    template = filled("template <", ["typename I", *named], ">", COLUMNS)
    lines = ["", *template, *_head(f"struct {shape}", base), *text.split("\n")]
    for at, member in enumerate(group.members):
        values = "".join(f", {each[at]}" for each in parameters)
        alias = definition(f"using {member.name}_body", f"{shape}<I{values}>", 0)
        lines += ["template <typename I>", *alias]
    return lines


def _head(struct: str, base: str) -> list[str]:
    short = f"{struct} {base}"
    return [short] if len(short) <= COLUMNS else [struct, f"    {base}"]


def _bracketed(found: re.Match[str]) -> str:
    return re.sub(r"(kN\d+(?: \* \w+)+)", r"(\1)", found.group())


def groups_by_name(groups: Sequence[Group]) -> dict[str, Group]:
    """The group of each functor, by name."""
    return {each.name: group for group in groups for each in group.members}
