"""The functor of a kernel: a struct that drivers call, and the arithmetic that it calls.

The same C++ text is for nvcc and for g++. Pointers, symbols and constants are members. `load` reads
V lanes of every element access. `visit` computes, accumulates and stores them. `begin` computes row
values before the first sweep, `finish` after each sweep, and `store` writes them. A function that
does nothing is inherited from `fw::Functor`. Its names are numbers, so that kernels of the same
structure have the same text: x0 for values, a0 for arguments. The arithmetic has the model's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusewright.codegen import body
from fusewright.codegen.access import transpose_lines, transposed_loads
from fusewright.codegen.accumulators import accumulators
from fusewright.codegen.arithmetic import Math, extracted
from fusewright.codegen.form import Form
from fusewright.codegen.lanes import braced, indented, words
from fusewright.codegen.members import (
    elem_struct,
    extents,
    fixed_members,
    late_constants,
    members,
    row_struct,
)
from fusewright.codegen.row_factors import factor_parts
from fusewright.codegen.runs import pair_lines
from fusewright.codegen.scans import scanned_parts
from fusewright.codegen.shared_memory import shared_parts
from fusewright.codegen.source import Functor
from fusewright.codegen.tidy import tidied, without_aliases
from fusewright.codegen.transpose import tile_parts
from fusewright.schedule.sweeps import element_loads

_FUNCTION = re.compile(r"(FW_[A-Z_]+)\((\d*)\)|.*\b(visit|begin|compute)\((?:fw::Phase<(\d+)>)?")
_NAMES = {"FW_VISIT": "element", "FW_BEGIN": "before", "FW_FINISH": "after", "FW_END": "element"}
_NAMES |= {"FW_SWEEP": "sweep", "FW_KEEPING_SWEEP": "sweep"}
_NAMES |= {"visit": "sweep", "begin": "before", "compute": "row_factors"}


def functor(of: Form) -> Functor:
    form = numbered(of)
    parts = _flat_parts(form) if form.is_flat else _row_parts(form)
    given = [[f"FW_GIVE({form.names[form.given]})"]] if form.given else []
    return assembled(form, of.names, [*parts, *given], extents(form))


def numbered(form: Form) -> Form:
    """The form with numbers as names."""
    names = {key: f"x{at}" for at, key in enumerate(form.names)}
    pointers = {each.name: f"a{at}" for at, each in enumerate(form.kernel.arguments)}
    return replace(form, names=names, pointers={**form.pointers, **pointers})


def assembled(
    form: Form, names: Mapping[str, str], parts: Sequence[list[str]], first: Sequence[str] = ()
) -> Functor:
    """The struct of these functions and structs, whose arithmetic is taken out. In the arithmetic,
    values have the names `names`."""
    name, fixed = form.kernel.name, fixed_members(form)
    types = dict.fromkeys(form.symbols.values(), "I") | late_constants(form)
    texts = {key: _constant(line) for key, line in fixed.items()}
    shown = {form.names[key]: each for key, each in names.items()}
    math = Math(types, texts, form.language == "cuda", shown)
    made = [_made(part, math) for part in parts]
    mentioned = words(line for part in made for line in part)
    kept = [line for key, line in fixed.items() if key in mentioned]
    lines = indented([*members(form), *kept, *first])
    for part in made:
        lines += ["", *indented(part)] if len(part) > 1 else indented(part)
    own = frozenset((*names.values(), *form.symbols.values()))
    return Functor(name, tuple(math.lines()), (*lines, "};"), own)


def _made(part: list[str], math: Math) -> list[str]:
    """A function or struct, without its arithmetic."""
    lines = extracted(without_aliases(part), math, _name_of(part))
    first = next((at for at, line in enumerate(lines) if line.endswith("{")), len(lines))
    if lines[-1] != "}" or any(line.startswith("struct") for line in lines):
        return lines
    body = [line[2:] for line in lines[first + 1 : -1]]
    return braced(lines[: first + 1], tidied(body))


def _constant(definition: str) -> tuple[str, str]:
    """The type and the text of a constant. A whole number has its type in its text."""
    kind, value = definition.split()[2], definition.partition(" = ")[2].rstrip(";")
    typed = "int" in kind and kind != "int32_t"
    if "numeric_limits" in value:  # Device code may not call functions of the standard library.
        name = "QuietNan" if "NaN" in value else "Lowest" if value.startswith("-") else "Highest"
        return kind, f"fw::k{name}<{kind}>"
    return kind, f"{kind}({value})" if typed else value


def _name_of(part: Sequence[str]) -> str:
    """What the arithmetic of a function is called."""
    for line in part:
        if found := _FUNCTION.match(line):
            name = _NAMES.get(found[1] or found[3], "")
            number = found[2] or found[4] or ""
            return f"{name}_{number}" if name and number else name or "source"
    return "source"


def _flat_parts(form: Form) -> list[list[str]]:
    parts = tile_parts(form) if form.is_tiled else []
    parts += [elem_struct(form, body.pointwise_loads(form))]
    parts += [body.pointwise_load(form), body.pointwise_visit(form)]
    return parts + ([transpose_lines(form)] if transposed_loads(form) else [])


def _row_parts(form: Form) -> list[list[str]]:
    excluded = {*form.tiles, *form.factors}
    loads = [x for x in element_loads(form.kernel, form.plan) if x not in excluded]
    phases = range(form.plan.count)
    parts = tile_parts(form) if form.is_tiled else []
    parts += [elem_struct(form, loads), *factor_parts(form), row_struct(form)]
    if form.scans:
        parts += scanned_parts(form)
    elif any(form.plan.reductions):
        parts += [[accumulators(form, k) for k in phases]]
    parts += [body.begin(form), *([body.keep(form)] if body.keeps(form) else [])]
    parts += _needed([body.load(form, loads)])
    parts += shared_parts(form) if form.schedule.shared else []
    parts += [body.visit(form, k) for k in phases]
    parts += [] if form.scans else _needed([body.finish(form, k) for k in phases])
    parts += [body.visit_two(form)] if pair_lines(form) else []
    return parts + _needed([body.row_store(form)])


def _needed(functions: list[list[str]]) -> list[list[str]]:
    """These overloads, or none if no one does anything."""
    return functions if any(not each[-1].endswith("{}") for each in functions) else []
