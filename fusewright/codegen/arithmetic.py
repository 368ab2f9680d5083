"""Takes the arithmetic out of a functor's functions, into functions that people can read.

A functor moves lanes between memory and registers. What it computes with them are definitions whose
right sides call operators only. They become a function of their inputs, with a result or with
references to several. A value that is used once stands where it is used, and operators of floats
are written as in C++.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fusewright.codegen.expressions import Expressions, Step
from fusewright.codegen.lanes import braced, words
from fusewright.codegen.layout import COLUMNS, assignment, call, declaration
from fusewright.codegen.members import grouped

_ALIAS = re.compile(r"  const [\w:]+ (\w+) = (row\.\w+\[0\]|factors\.\w+);")
_DEFINITION = re.compile(r"const ([\w:]+) (\w+) = (.*);")
_VARIABLE = re.compile(
    r"(?!return\b)(?:const |constexpr )?[\w:]+(?:<[^;=]*>)?[*&]? \w+(?:\(|\[| =|;)"
)
_ARGUMENT = r"(?:fw::Near\{\}|fw::CommonDivisor\(\w+\)|\w+)"
_OPERATOR = re.compile(rf"fw::(\w+)(<[\w:]+>)?\(({_ARGUMENT}(?:, {_ARGUMENT})*)\)")
_USABLE = re.compile(r"float|double|bool|u?int\d+_t|fw::CommonDivisor")
_VALUE = re.compile(r"\bx\d+(?![A-Za-z0-9])")
_INDENT = 4  # of statements in a function


_Values = Sequence[tuple[str, str]]  # types and names


@dataclass(frozen=True)
class _Function:
    """Its parameters, results and statements. With `near`, it can be told that arguments are near
    (see `lanes`)."""

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    statements: tuple[str, ...]
    near: bool

    def is_like(self, other: _Function) -> bool:
        plain = tuple(each.replace("near..., ", "") for each in self.statements)
        return (self.inputs, self.outputs, plain) == (other.inputs, other.outputs, other.statements)

    def lines(self, name: str) -> list[str]:
        kind = self.outputs[0][0] if len(self.outputs) == 1 else "void"
        parameters = [f"{kind} {each}" for kind, each in self.inputs]
        if kind == "void":
            parameters += [f"{kind}& {each}" for kind, each in self.outputs]
        parameters += ["Near... near"] * self.near
        head = declaration(f"FW_MATH {kind} ", f"{name}({', '.join(parameters)})", "")
        template = ["template <class... Near>"] * self.near
        return braced([*template, *head], self.statements)


@dataclass
class Math:
    """The functions that were taken out, by name. `types` are those of a functor's members, and
    `constants` the text of its constants. With `forwards`, loads may become arguments of a call:
    their order is then up to the compiler. `names` are what people call the functor's values."""

    types: Mapping[str, str]
    constants: Mapping[str, tuple[str, str]]
    forwards: bool
    names: Mapping[str, str] = field(default_factory=dict)
    functions: dict[str, _Function] = field(default_factory=dict)

    def lines(self) -> list[str]:
        return [line for name, each in self.functions.items() for line in each.lines(name)]

    def shown(self, text: str) -> str:
        """The text with the names that people use."""
        return _VALUE.sub(lambda found: self.names.get(found.group(), found.group()), text)

    def named(self, function: _Function, wanted: str) -> str:
        """The name of a function. An equal one, or one that can also do without `near`, is used
        again."""
        for name, known in self.functions.items():
            if known == function or (known.near and not function.near and known.is_like(function)):
                return name
        name, serial = wanted, 2
        while name in self.functions:
            name, serial = f"{wanted}_{serial}", serial + 1
        self.functions[name] = function
        return name


def extracted(lines: Sequence[str], math: Math, name: str) -> list[str]:
    """A function's lines with calls of functions, which are added to `math`."""
    types = dict(math.types)
    for line in lines:
        if found := _DEFINITION.fullmatch(line.strip()):
            types[found[2]] = found[1]
    made: list[str] = []
    aliases = _aliases(lines) if math.forwards else {}
    for first, last in _blocks(lines):
        outside = words([*lines[:first], *lines[last:]])
        made += _Block(lines[first:last], types, math, name, outside, aliases).lines()
    return [line for at, line in enumerate(made) if not _is_unused(made, at, aliases)]


def _aliases(lines: Sequence[str]) -> dict[str, str]:
    """What a function's names for members of rows stand for."""
    found = (_ALIAS.fullmatch(line) for line in lines)
    return {each[1]: each[2] for each in found if each}


def _is_unused(lines: Sequence[str], at: int, aliases: Mapping[str, str]) -> bool:
    """Whether a line defines a name that no other line needs."""
    found = _ALIAS.fullmatch(lines[at])
    if found is None or found[1] not in aliases:
        return False
    member = re.compile(rf"(?<![\w.]){found[1]}\b")
    return not any(member.search(line) for other, line in enumerate(lines) if other != at)


def _blocks(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The ranges of neighbouring statements of one level, and all other lines, one by one."""
    first = 0
    for at in range(1, len(lines) + 1):
        if at < len(lines) and _level(lines[at]) == _level(lines[first]) is not None:
            continue
        yield first, at
        first = at


def _level(line: str) -> int | None:
    """The indentation of a statement. None for other lines."""
    text = line.lstrip()
    plain = text.endswith(";") and not text.startswith(("#", "FW_LANES", "if ", "far |="))
    return len(line) - len(text) if plain else None


@dataclass
class _Segment:
    """Definitions, then steps that may read them, then statements that may read both."""

    before: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


class _Block:
    """Statements of one level, of which some become a call."""

    def __init__(
        self,
        lines: Sequence[str],
        types: Mapping[str, str],
        math: Math,
        name: str,
        outside: set[str],
        aliases: Mapping[str, str],
    ) -> None:
        self._aliases = aliases
        self._lines, self._types, self._math, self._name = lines, types, math, name
        self._outside = outside
        self._indent = " " * (len(lines[0]) - len(lines[0].lstrip()))

    def lines(self) -> list[str]:
        segments = self._segments()
        if not any(each.steps for each in segments):
            return self._direct() if self._math.forwards else list(self._lines)
        made: list[str] = []
        for at, each in enumerate(segments):
            later = words([line for more in segments[at + 1 :] for line in _text_of(more)])
            made += self._called(each, later | self._outside) if each.steps else _text_of(each)
        return [self._indent + line for line in made]

    def _direct(self) -> list[str]:
        """The statements, with a value that is used once where it is used."""
        lines = list(self._lines)
        for line in self._lines:
            found = _DEFINITION.fullmatch(line.strip())
            if found is None or found[2] in self._outside or found[1] == "I":
                continue
            uses = [each for each in lines if each != line and found[2] in words([each])]
            if len(uses) == 1 and _counted(uses[0], found[2]) == 1 and "const " not in uses[0]:
                whole = re.sub(rf"(?<![\w.]){found[2]}(?!\w)", found[3], uses[0])
                if len(whole) + 2 <= COLUMNS:
                    lines[lines.index(uses[0])] = whole
                    lines.remove(line)
        return lines

    def _segments(self) -> list[_Segment]:
        found = [_Segment()]
        for line in (each.strip() for each in self._lines):
            now = found[-1]
            step = self._step(line)
            if step is not None:
                now.steps.append(step)
            elif _VARIABLE.match(line):
                # What is read from memory may have been written by a statement before.
                reads_memory = now.after and "fw::nth<" not in line
                if reads_memory or _mentions([line], [each.name for each in now.steps]):
                    found.append(_Segment())
                found[-1].before.append(line)
            else:
                now.after.append(line)
        return found

    def _step(self, line: str) -> Step | None:
        """A definition whose right side calls an operator with values that a function can take."""
        defined = _DEFINITION.fullmatch(line)
        applied = _OPERATOR.fullmatch(defined[3]) if defined else None
        if defined is None or applied is None:
            return None
        arguments = tuple(applied[3].split(", "))
        step = Step(defined[1], defined[2], applied[1], applied[2] or "", arguments)
        known = all(
            each in self._math.constants or _USABLE.fullmatch(self._types.get(each, ""))
            for each in step.reads
        )
        return step if known else None

    def _called(self, segment: _Segment, later: set[str]) -> list[str]:
        wanted = words(segment.after) | later
        outputs = [(each.kind, each.name) for each in segment.steps if each.name in wanted]
        if not outputs:
            return [*segment.before, *segment.after]
        own = {each.name for each in segment.steps}
        read = dict.fromkeys(name for step in segment.steps for name in step.reads)
        inputs = [
            (self._types[name], name)
            for name in read
            if name not in own and name not in self._math.constants
        ]
        near = any(each.is_near for each in segment.steps)
        name = self._math.named(self._function(segment.steps, inputs, outputs), self._name)
        before = list(segment.before)
        arguments = [self._aliases.get(each, each) for _, each in inputs]
        if self._math.forwards:
            before, arguments = self._forwarded(segment, arguments, later)
        return [*before, *self._call(name, arguments, near, outputs, segment.after, later)]

    def _function(self, steps: Sequence[Step], inputs: _Values, outputs: _Values) -> _Function:
        """The function that people read."""
        shown = self._math.shown
        read = {name for step in steps for name in step.reads}
        types = {shown(name): kind for name, kind in self._types.items() if name in read}
        constants = {shown(name): each for name, each in self._math.constants.items()}
        given, made = ([(kind, shown(name)) for kind, name in each] for each in (inputs, outputs))
        steps = [each.renamed(shown) for each in steps]
        texts = Expressions(types, constants, COLUMNS - _INDENT)
        statements = tuple(texts.statements(steps, [name for _, name in made]))
        near = any(each.is_near for each in steps)
        return _Function(tuple(given), tuple(made), statements, near)

    def _forwarded(
        self, segment: _Segment, inputs: Sequence[str], later: set[str]
    ) -> tuple[list[str], list[str]]:
        """The definitions that stay, and the arguments. A definition that only the call reads is
        written into it."""
        arguments = list(inputs)
        before = list(segment.before)
        for line in segment.before:
            found = _DEFINITION.fullmatch(line)
            others = words([each for each in before if each != line]) | words(segment.after) | later
            if found and found[2] in arguments and found[2] not in others:
                before.remove(line)
                arguments[arguments.index(found[2])] = found[3]
        return before, arguments

    def _call(
        self,
        name: str,
        arguments: list[str],
        near: bool,
        outputs: Sequence[tuple[str, str]],
        after: list[str],
        later: set[str],
    ) -> list[str]:
        given = [*arguments, *(["fw::Near{}"] if near else [])]
        indent = len(self._indent) + 2  # functions are members of a struct
        if len(outputs) > 1:
            given[len(arguments) : len(arguments)] = [each for _, each in outputs]
            declared = grouped(sorted(outputs, key=lambda each: each[0]), COLUMNS - indent)
            return [*declared, *call("", name, given, ";", indent), *after]
        ((kind, output),) = outputs
        uses = [line for line in after if output in words([line])]
        direct = f"{name}({', '.join(given)})"
        if len(uses) == 1 and output not in later and _counted(uses[0], output) == 1:
            inlined = re.sub(rf"(?<![\w.]){output}(?!\w)", direct, uses[0])
            if len(inlined) + indent <= COLUMNS:
                return [inlined if line == uses[0] else line for line in after]
        return [*assignment(f"const {kind} {output}", name, given, indent), *after]


def _text_of(segment: _Segment) -> list[str]:
    steps = [step.line for step in segment.steps]
    return [*segment.before, *steps, *segment.after]


def _mentions(lines: Sequence[str], names: Sequence[str]) -> bool:
    return not words(lines).isdisjoint(names)


def _counted(line: str, name: str) -> int:
    return len(re.findall(rf"(?<![\w.]){name}(?!\w)", line))
