"""`unit`: rendered kernels → one translation unit.

The text begins with the files of `kernels/` that it needs, each once. So it includes only headers
of the standard toolchain. The same kernels give the same text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fusewright.codegen.pruned import support_lines
from fusewright.codegen.reachable import parsed
from fusewright.codegen.source import Entry, Piece, Rendered, Source, macro
from fusewright.errors import CodegenError
from fusewright.ir.loop import Apply, Load, Reduce
from fusewright.ir.operators import REDUCTIONS, SCALAR_OPS

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
# Headers of loops, in the order in which they are pasted. Others follow in alphabetical order.
_LOOP_HEADERS = ("pointwise", "row", "column", "held_column", "transpose", "scan", "guarded")
_FIRST = {
    "cuda": ("cuda/lanes.cuh", *(f"cuda/{name}.cuh" for name in _LOOP_HEADERS)),
    "host": ("host/loops.hpp", "host/scan.hpp", "host/guarded.hpp"),
}
_PRECISIONS = (
    "// Which kernels are built, and how precise they are, if flags decide that: 3 terms for",
    "// float32's precision, 1 for TF32's, 0 to leave the kernels out.",
)
ALWAYS = ("fw_error_text",)  # functions that are called for every source
_LOCAL_INCLUDE = re.compile(r'#include "([a-z0-9_/]+\.(?:hpp|cuh))"')


def unit(made: Sequence[tuple[Entry, Rendered]], language: str) -> Source:
    """One translation unit with an entry per kernel and `fw_error_text`."""
    parts = [part for _, part in made]
    names = [name for part in parts for name in part.names]
    if len(set(names)) != len(names):
        raise CodegenError(f"two kernels have the same name: {sorted(names)}")
    own = _sections(parts)
    lines = [*_options(parts), *_support(parts, language, own), *own]
    pieces = tuple(Piece("\n".join(each.lines), each.weight, macro(each.terms)) for each in parts)
    entries = tuple(entry for entry, _ in made)
    return Source(language, "\n".join(lines) + "\n", entries, pieces)


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
    """The kernels' text. Kernels whose precision a flag decides can be built separately."""
    sections: dict[str, list[str]] = {}
    for part in parts:
        sections.setdefault(part.terms, []).extend(["", *part.lines])
    if not any(sections):
        return sections.get("", [])
    lines = ["", *_PRECISIONS]
    for terms in sections:
        lines += [f"#ifndef {macro(terms)}", f"#define {macro(terms)} 3", "#endif"]
    for terms, text in sections.items():
        lines += ["", f"#if {macro(terms)}", *text, "", f"#endif  // {macro(terms)}"]
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
