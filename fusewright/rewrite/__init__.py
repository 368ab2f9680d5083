"""`Program` → `Program`: canonical operators, then algebra. Both keep every value's meaning."""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir import Graph, Program, validate
from fusewright.rewrite.lower import lower
from fusewright.rewrite.rules import simplify


def rewrite(program: Program) -> Program:
    """All three graphs of a program in canonical form."""
    return replace(
        program,
        forward=rewrite_graph(program.forward),
        inference=rewrite_graph(program.inference),
        backward=rewrite_graph(program.backward) if program.backward else None,
    )


def rewrite_graph(graph: Graph) -> Graph:
    result = simplify(lower(graph))
    validate(result)
    return result
