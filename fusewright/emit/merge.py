"""Two versions of a driver as one function: with our kernels on tensor cores, and without.

In a network most steps of both are the same lines. What differs is chosen by a first parameter.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fusewright.emit.drivers import Definition
from fusewright.emit.python import indented

CORES = "fw_cores"
# Less common text is not worth the branches.
_WORTH = 0.5


def merged(cores: Definition, plain: Definition) -> Definition | None:
    """One function for both, or None if they have too little in common."""
    if list(cores.parameters) != list(plain.parameters):
        return None
    first, second = _statements(cores.body), _statements(plain.body)
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    blocks = matcher.get_opcodes()
    common = sum(len(text) for tag, a, b, _, _ in blocks if tag == "equal" for text in first[a:b])
    if common < _WORTH * len("\n".join(plain.body)):
        return None
    body: list[str] = []
    for tag, a, b, c, d in blocks:
        ours, theirs = _lines(first[a:b]), _lines(second[c:d])
        if tag == "equal":
            body += ours
        elif ours:
            body += [f"if {CORES}:", *indented(ours)]
            body += ["else:", *indented(theirs)] if theirs else []
        else:
            body += [f"if not {CORES}:", *indented(theirs)]
    return Definition(cores.kind, [CORES, *cores.parameters], cores.doc, body)


def _statements(body: Sequence[str]) -> list[str]:
    """The statements of a function's body, each as one text with its block."""
    found: list[str] = []
    for line in body:
        if line.startswith(" "):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


def _lines(statements: Sequence[str]) -> list[str]:
    return [line for each in statements for line in each.split("\n")]
