"""Edits of Python text: where a node of its syntax tree stands, and what replaces it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

Spot = tuple[int, int]


def lines_of(text: str) -> list[str]:
    """Python's lines, with their ends: str.splitlines splits at other characters, too."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


@dataclass(frozen=True)
class Edit:
    """`text` replaces `old`, from `start` to `end` (line from 1, column in characters)."""

    start: Spot
    end: Spot
    old: str
    text: str


def edited(lines: Sequence[str], edits: Sequence[Edit]) -> str:
    lines = list(lines)
    for each in sorted(edits, key=lambda edit: edit.start, reverse=True):
        (first, start), (last, end) = each.start, each.end
        lines[first - 1 : last] = [lines[first - 1][:start] + each.text + lines[last - 1][end:]]
    return "".join(lines)


def spot(lines: Sequence[str], line: int, offset: int) -> Spot:
    """A position in the text. The columns of a syntax tree count bytes."""
    return line, len(lines[line - 1].encode()[:offset].decode())


def span(node: ast.stmt | ast.expr, lines: Sequence[str]) -> tuple[Spot, Spot]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = spot(lines, node.lineno, node.col_offset)
    return start, spot(lines, node.end_lineno, node.end_col_offset)


def outermost(edits: Sequence[Edit]) -> list[Edit]:
    """Edits that are in no other one."""
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda each: (each.start, tuple(-at for at in each.end))):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept
