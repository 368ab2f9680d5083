"""`unit`: rendered kernels → one translation unit.

The text begins with the files of `kernels/` that it needs, each once. So it includes only headers
of the standard toolchain. The same kernels give the same text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path

from fusewright.codegen.entry import list_macros
from fusewright.codegen.lanes import indented
from fusewright.codegen.layout import COLUMNS
from fusewright.codegen.pruned import support_lines
from fusewright.codegen.reachable import parsed
from fusewright.codegen.shared import MATH, Group, functor_lines, grouped_functors, groups_by_name
from fusewright.codegen.source import (
    KERNELS_LINE,
    MOST_PARTS,
    Entry,
    Piece,
    Rendered,
    Source,
    macro,
    shares,
)
from fusewright.codegen.text import comment
from fusewright.errors import CodegenError
from fusewright.ir.loop import Apply, Load, Reduce
from fusewright.ir.operators import REDUCTIONS, SCALAR_OPS
from fusewright.runtime import library

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
# Headers of loops, in the order in which they are pasted. Others follow in alphabetical order.
_LOOPS = ("pointwise", "row", "column", "held_column", "transpose", "transpose_column")
_FIRST = {
    "cuda": ("cuda/lanes.cuh", *(f"cuda/{x}.cuh" for x in (*_LOOPS, "scan", "guarded"))),
    "host": ("host/loops.hpp", "host/scan.hpp", "host/guarded.hpp"),
}
_PRECISIONS = (
    "// Which kernels are built, and how precise they are, if flags decide that: 3 terms for",
    "// float32's precision, 1 for TF32's, 0 to leave the kernels out.",
)
ALWAYS = ("fw_error_text",)  # functions that are called for every source
_LOCAL_INCLUDE = re.compile(r'#include "([a-z0-9_/]+\.(?:hpp|cuh))"')


def unit(
    made: Sequence[tuple[Entry, Rendered]], language: str, shown: Collection[str] | None = None
) -> Source:
    """One translation unit with an entry per kernel and `fw_error_text`. What readers are shown are
    the kernels with the names `shown`, or all of them."""
    parts = [part for _, part in made]
    names = [name for part in parts for name in part.names]
    if len(set(names)) != len(names):
        raise CodegenError(f"two kernels have the same name: {sorted(names)}")
    first = [part for entry, part in made if shown is None or entry.name in shown]
    others = [part for part in parts if part not in first]
    groups = grouped_functors(each for part in (*first, *others) for each in part.functors)
    written: dict[tuple[str, ...], Rendered] = {}
    kernels, hidden = (_kernels(each, groups, written) for each in (first, others))
    lists = list_macros(line for part in parts for line in part.lines)
    own = [*_after_blank(hidden if others else []), *_functors(groups)]
    own += [*_after_blank(lists), *_sections(parts)]
    needed = _support(parts, language, [*kernels, *own])
    support = "\n".join([*_options(parts), *needed, "", KERNELS_LINE.rstrip(), *own]) + "\n"
    pieces = tuple(Piece("\n".join(each.lines), each.weight, macro(each.terms)) for each in parts)
    readable = "\n".join(kernels) + "\n"
    text = support.replace(KERNELS_LINE, readable)
    entries = tuple(entry for entry, _ in made)
    return Source(language, text, entries, pieces, readable, support)


def _kernels(
    parts: Sequence[Rendered], groups: Sequence[Group], shown: dict[tuple[str, ...], Rendered]
) -> list[str]:
    """What the kernels compute: comments and arithmetic. `shown` are those of which others are
    variants."""
    lines, group = [f"namespace {MATH} {{"], groups_by_name(groups)
    for part in parts:
        used = tuple(group[each.name].members[0].name for each in part.functors)
        before = shown.setdefault(used, part) if used else part
        if before is not part and _summary(before) == _summary(part):
            lines += _commented([_as_another(part, before)])
            continue
        with_math = [each for each in part.functors if each.math]
        own = [each for each in with_math if group[each.name].math is each]
        others = {group[each.name].math.name for each in with_math if each not in own}
        known = [f"Its arithmetic is that of {' and '.join(sorted(others))}."] if others else []
        lines += ["", *_commented([*_joined(part.comment), *known])]
        for each in own:
            lines += [f"struct {each.name} {{", *indented(each.math), "};"]
    return [*lines, "", f"}}  // namespace {MATH}"]


def _summary(part: Rendered) -> str:
    return part.comment[0].partition(":")[2]


def _as_another(part: Rendered, before: Rendered) -> str:
    own, other = (each.comment[0].partition(":")[0] for each in (part, before))
    return f"{own}: as {other}; {part.comment[-1]}"


def _joined(lines: Sequence[str]) -> list[str]:
    """A kernel's comment. Its first line, and its last with sizes and counts, are one if that is
    short enough."""
    if not lines:
        return []
    first, *rest = lines
    whole = f"{first}; {rest[-1]}" if rest else first
    fits = len(comment(whole)) + len("// ") <= COLUMNS
    return [whole, *rest[:-1]] if fits else [*lines]


def _after_blank(lines: Sequence[str]) -> list[str]:
    return ["", *lines] if lines else []


def _commented(lines: Sequence[str]) -> list[str]:
    """The lines as comments. What is too long goes on in the next line."""
    made: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        made += textwrap.wrap(
            comment(line),
            COLUMNS,
            initial_indent=f"// {indent}",
            subsequent_indent=f"// {indent}    ",
            break_on_hyphens=False,
        )
    return made


def _functors(groups: Sequence[Group]) -> list[str]:
    """What drivers call."""
    if not groups:
        return []
    lines = [line for group in groups for line in functor_lines(group)]
    return ["", "namespace {", *lines, "", "}  // namespace"]


def _options(parts: Sequence[Rendered]) -> list[str]:
    """Definitions that switch off what no kernel needs."""
    options = sorted({name for part in parts for name in part.options})
    unneeded = [name for name in options if not any(part.options.get(name) for part in parts)]
    return [f"#define {name} 0" for name in unneeded]


def _support(parts: Sequence[Rendered], language: str, own: Sequence[str]) -> list[str]:
    """What the kernels' text needs of our headers."""
    lines: list[str] = []
    pasted: set[str] = set()
    for root in _headers(parts, language):
        lines += flattened(root, pasted)
    headers = parsed("\n".join(lines), frozenset({("__CUDACC__", language == "cuda")}))
    return [*headers.includes, *support_lines(headers, "\n".join([*own, *ALWAYS]))]


def _sections(parts: Sequence[Rendered]) -> list[str]:
    """The kernels' text, in groups that can be compiled side by side. Kernels whose precision a
    flag decides can be built separately."""
    lines: list[str] = []
    flags = dict.fromkeys(part.terms for part in parts)
    if any(flags):
        lines += ["", *_PRECISIONS]
        for terms in flags:
            lines += [f"#ifndef {macro(terms)}", f"#define {macro(terms)} 3", "#endif"]
    groups = shares([part.weight for part in parts], MOST_PARTS)
    for group in groups:
        lines += ["", library._FW_CUT.rstrip()] if len(groups) > 1 else []
        lines += _group([parts[at] for at in group], guarded=any(flags))
    return lines


def _group(parts: Sequence[Rendered], guarded: bool) -> list[str]:
    sections: dict[str, list[str]] = {}
    for part in parts:
        sections.setdefault(part.terms, []).extend(["", *part.lines])
    lines: list[str] = []
    for terms, text in sections.items():
        name = macro(terms)
        lines += ["", f"#if {name}", *text, "", f"#endif  // {name}"] if guarded else text
    return lines


def _headers(parts: Sequence[Rendered], language: str) -> list[str]:
    """The header files of these kernels: first those of operators, then those of loops."""
    body = [item for part in parts for loop in part.bodies for item in loop.body]
    operators = {SCALAR_OPS[item.op].header for item in body if isinstance(item, Apply)}
    operators |= {REDUCTIONS[item.kind].header for item in body if isinstance(item, Reduce)}
    first, *_ = known = _FIRST[language]
    needed = {first, *(name for part in parts for name in part.headers)}
    if any(isinstance(item, Load) and item.access.guards for item in body):
        needed.add(known[-1])
    loops = [name for name in known if name in needed]
    return [*sorted(operators - {""}), *loops, *sorted(needed - set(known))]


def flattened(name: str, pasted: set[str]) -> list[str]:
    """A header's lines with the text of its local includes, each file once."""
    if name in pasted:
        return []
    pasted.add(name)
    lines: list[str] = []
    for line in (KERNELS / name).read_text().splitlines():
        local = _LOCAL_INCLUDE.match(line)
        if local:
            lines += flattened(local.group(1), pasted)
        elif line != "#pragma once":
            lines.append(line)
    return lines
